"""Staying awake: what is asked for is seen without sleep, which comes when the vigil is over. No wait gets longer."""

import asyncio
import os
import selectors
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercet.ipc.sockets import Inbox, Outbox
from tercet.ipc.step_messages import Abort
from tercet.ipc.vigil import Vigil, VigilantSelector
from whole_engine import GREEDY, ids_of, tiny_engine

LONG = 60.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The timeouts that the selector itself was asked to wait for."""
    asked: list[float | None] = []
    select = selectors.DefaultSelector.select

    def counted(self: selectors.DefaultSelector, timeout: float | None = None) -> object:
        if timeout != 0:
            asked.append(timeout)
        return select(self, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", counted)
    return asked


@pytest.mark.parametrize("timeout", [None, LONG])
def test_awake_it_does_not_sleep(pipe: tuple[int, int], sleeps: list[float | None], timeout: float | None) -> None:
    vigil = Vigil(LONG)
    selector = VigilantSelector(vigil)
    selector.register(pipe[0], selectors.EVENT_READ)
    vigil.begin()
    threading.Timer(0.05, os.write, (pipe[1], b"x")).start()
    ((key, _),) = selector.select(timeout)
    assert key.fd == pipe[0]
    assert not sleeps
    selector.close()


@pytest.mark.parametrize("how", ["never begun", "no time", "ended", "over"])
def test_otherwise_it_sleeps(pipe: tuple[int, int], sleeps: list[float | None], how: str) -> None:
    vigil = Vigil({"no time": 0.0, "over": 0.01}.get(how, LONG))
    selector = VigilantSelector(vigil)
    selector.register(pipe[0], selectors.EVENT_READ)
    if how != "never begun":
        vigil.begin()
    if how == "ended":
        vigil.end()
    threading.Timer(0.1, os.write, (pipe[1], b"x")).start()
    assert selector.select(LONG)
    assert len(sleeps) == 1
    selector.close()


@pytest.mark.parametrize("timeout", [0.0, 0.03])
def test_no_wait_gets_longer(sleeps: list[float | None], timeout: float) -> None:
    vigil = Vigil(LONG)
    selector = VigilantSelector(vigil)
    vigil.begin()
    began = time.monotonic()
    assert selector.select(timeout) == []
    assert timeout <= time.monotonic() - began < LONG / 2
    assert not sleeps
    selector.close()


def test_a_loop_that_is_awake_runs_timers_and_hears_threads() -> None:
    vigil = Vigil(LONG)
    loop = asyncio.SelectorEventLoop(VigilantSelector(vigil))

    async def work() -> None:
        vigil.begin()
        await asyncio.sleep(0.01)
        heard = loop.create_future()
        threading.Timer(0.02, loop.call_soon_threadsafe, (heard.set_result, None)).start()
        await heard

    loop.run_until_complete(asyncio.wait_for(work(), 20))
    loop.close()


def test_an_inbox_that_is_awake(tmp_path: Path) -> None:
    vigil = Vigil(0.05)
    inbox: Inbox[Abort] = Inbox(f"ipc://{tmp_path}/inbox", Abort, vigil=vigil)
    outbox = Outbox(f"ipc://{tmp_path}/inbox")
    vigil.begin()
    began = time.monotonic()
    assert inbox.receive(0.2) is None
    assert time.monotonic() - began >= 0.2
    for number in range(3):
        vigil.begin()
        outbox.send(Abort(bytes([number])))
        assert inbox.receive(LONG) == Abort(bytes([number]))
    outbox.close()
    inbox.close()


def test_an_engine_whose_processes_stay_awake_says_the_same() -> None:
    prompts = [[5, 6, 7], [8, 9], [10] * 20]
    said = []
    for busy_wait_ms in (0.0, 20.0):
        with tiny_engine("llama", busy_wait_ms=busy_wait_ms) as llm:
            said.append([ids_of(llm.generate([prompt], GREEDY, use_tqdm=False)) for prompt in prompts])
    assert said[0] == said[1]
