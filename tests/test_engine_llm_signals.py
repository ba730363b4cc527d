"""A program whose handlers of signals use the engine that they interrupt."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tercet.engine.engine_process import EngineProcess
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, EngineDied
from tercet.ipc.messages import SamplingParams

SHORT = SamplingParams(max_tokens=3)
LONG = SamplingParams(max_tokens=2000)


@pytest.fixture
def llm(ids_only_model: Path) -> Iterator[LLM]:
    with LLM(str(ids_only_model), load_format="null", null_step_ms=5, max_lease=1) as llm:
        yield llm


@contextmanager
def handler(act: Callable[[], object]) -> Iterator[list[object]]:
    """Of SIGUSR1; gives what `act` has returned."""
    results: list[object] = []

    def handle(number: int, frame: FrameType | None) -> None:
        results.append(act())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield results
    finally:
        signal.signal(signal.SIGUSR1, before)


def signal_soon() -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()


@pytest.mark.parametrize("prompts", [[5, 6], [[5, 6], [7]]])
def test_a_handler_closes_the_engine_that_it_interrupts(llm: LLM, prompts: list[int]) -> None:
    with handler(llm.close) as results:
        signal_soon()
        with pytest.raises(EngineDied, match="the client was closed"):
            llm.generate(prompts, LONG, use_tqdm=False)
        assert results == [None]
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate([5], SHORT, use_tqdm=False)


def test_a_handler_closes_it_and_ends_the_program(llm: LLM) -> None:
    def end() -> None:
        llm.close()
        raise SystemExit(3)

    with handler(end):
        signal_soon()
        with pytest.raises(SystemExit, match="3"):
            llm.generate([5, 6], LONG, use_tqdm=False)
    assert llm._engine.process.returncode == 0


def test_a_handler_asks_the_engine_that_it_interrupts(llm: LLM) -> None:
    with handler(lambda: len(llm.generate([7], SHORT, use_tqdm=False)[0].outputs[0].token_ids)) as results:
        signal_soon()
        (output,) = llm.generate([5, 6], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert results == [3]
    assert len(output.outputs[0].token_ids) == 100


@pytest.mark.parametrize("moment", ["client", "engine"])
def test_a_handler_closes_what_is_being_closed(llm: LLM, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, wait = Client.__aexit__, EngineProcess._wait

    async def leave_slowly(client: Client, *arguments: object) -> None:
        if moment == "client":
            monkeypatch.setattr(Client, "__aexit__", leave)
            signal.raise_signal(signal.SIGUSR1)
        await leave(client, *arguments)

    def wait_interrupted(engine: EngineProcess, seconds: float) -> None:
        if moment == "engine":
            monkeypatch.setattr(EngineProcess, "_wait", wait)
            signal.raise_signal(signal.SIGUSR1)
        wait(engine, seconds)

    monkeypatch.setattr(Client, "__aexit__", leave_slowly)
    monkeypatch.setattr(EngineProcess, "_wait", wait_interrupted)
    with handler(llm.close) as results:
        llm.close()
    assert results == [None]
    assert llm._engine.process.returncode == 0
