"""Any process of a live engine dies or hangs: streams pause and go on, and say what an undisturbed run says."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pytest

from checkpoints import random_prompts
from covering import long
from engine_children import children, is_alive
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, EngineDied, Generation, RequestRefused
from tercet.ipc.messages import SamplingParams
from whole_engine import generate, tiny_engine, wait_until_empty

NUM_TOKENS = 200
PROMPTS = random_prompts(6, 3, 60, seed=3)
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_engine("qwen3", heartbeat_timeout=2, max_lease=2, max_restarts=100, restart_window=0.1) as llm:
        yield llm


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[list[int]]:
    return generate(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        long("worker", signal.SIGKILL),
        ("worker", signal.SIGSTOP),
        ("scheduler", signal.SIGKILL),
        long("tokenizer", signal.SIGSTOP),
    ],
)
async def test_streams_go_on(llm: LLM, undisturbed: list[list[int]], name: str, number: signal.Signals) -> None:
    got: list[list[int]] = [[] for _ in PROMPTS]
    late: list[Generation] = []
    (process,) = children(llm._engine.process.pid, name)

    async def stream(client: Client, index: int) -> None:
        async for piece in client.stream(PROMPTS[index], PARAMS[index]):
            got[index] += piece.token_ids

    async def ask_during_the_outage(client: Client) -> None:
        late.append(await client.generate(PROMPTS[0], PARAMS[0]))

    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            for index in range(len(PROMPTS)):
                tasks.start_soon(stream, client, index)
            while min(map(len, got)) < 5:
                await anyio.sleep(0.01)
            process.send_signal(number)
            assert max(map(len, got)) < NUM_TOKENS
            tasks.start_soon(ask_during_the_outage, client)
    assert got == undisturbed
    assert late[0].token_ids == undisturbed[0]
    assert (late[0].usage.num_prompt_tokens, late[0].usage.num_generated_tokens) == (len(PROMPTS[0]), NUM_TOKENS)
    assert not is_alive(process)
    await anyio.to_thread.run_sync(wait_until_empty, llm.address)


async def test_a_request_without_a_seed_goes_on_with_the_one_it_was_given(llm: LLM) -> None:
    drawn, seed, got = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True), None, list[int]()
    (process,) = children(llm._engine.process.pid, "tokenizer")
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            async for piece in client.stream(PROMPTS[0], drawn):
                got += piece.token_ids
                if seed is None:
                    (call,) = client._calls
                    seed = call.request.params.seed
                    process.kill()
            assert seed is not None
            again = await client.generate(PROMPTS[0], msgspec.structs.replace(drawn, seed=seed))
            other = await client.generate(PROMPTS[0], drawn)
    assert got == again.token_ids != other.token_ids


@pytest.mark.parametrize("name", ["worker", long("scheduler"), long("tokenizer")])
async def test_several_answers_go_on(llm: LLM, name: str) -> None:
    """One of three has ended by then; it is not said again."""
    drawn = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            whole = [one.token_ids for one in await client.generate_several(PROMPTS[1], drawn)]
            stop = next(token for token in whole[1][3:] if token not in whole[0][:200] + whole[2][:200])
            drawn = msgspec.structs.replace(drawn, stop_token_ids=(stop,))
            wanted = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in whole]
            got: list[list[int]] = [[], [], []]
            (process,) = children(llm._engine.process.pid, name)
            is_killed, ended = False, set()
            async for piece in client.stream(PROMPTS[1], drawn):
                got[piece.index] += piece.token_ids
                if piece.generation is not None:
                    assert piece.generation.token_ids == got[piece.index]
                    assert piece.index not in ended
                    ended.add(piece.index)
                if ended == {1} and min(map(len, got)) > 2 and not is_killed:
                    process.kill()
                    is_killed = True
    assert is_killed
    assert ended == {0, 1, 2}
    assert got == wanted
    await anyio.to_thread.run_sync(wait_until_empty, llm.address)


@pytest.fixture
def poisoned(ids_only_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "poison"), prepend=os.pathsep)
    config = EngineConfig(model=str(ids_only_model), load_format="null", heartbeat_timeout=2, max_restarts=10)
    with EngineProcess(config) as engine:
        yield engine


@pytest.mark.parametrize(
    ("token_id", "words"),
    [
        (6660, "was killed by SIGABRT"),
        long(6661, "ArithmeticError: NaN everywhere"),
        long(6662, "hung: it said nothing"),
    ],
)
async def test_a_request_that_kills_workers_is_refused_after_two_tries(
    poisoned: EngineProcess, token_id: int, words: str
) -> None:
    """Innocents that run with it, came before it or come after it get their whole answers."""
    ends: dict[str, list[int]] = {}

    async def innocent(client: Client, name: str, length: int) -> None:
        answer = await client.generate([1] * length, SamplingParams(max_tokens=500, ignore_eos=True))
        ends[name] = answer.token_ids

    async def poison(client: Client) -> None:
        with pytest.raises(RequestRefused, match="died twice while they computed this request") as caught:
            await client.generate([5, token_id], SamplingParams(max_tokens=5))
        assert words in str(caught.value)
        assert caught.value.code == "kills_workers"
        (worker,) = children(poisoned.process.pid, "worker")
        with pytest.raises(RequestRefused, match="not tried again before 60 s"):
            await client.generate([5, token_id], SamplingParams(max_tokens=5))
        assert is_alive(worker)

    (first,) = children(poisoned.process.pid, "worker")
    async with Client(poisoned.address) as client, anyio.create_task_group() as tasks:
        for i in range(5):
            tasks.start_soon(innocent, client, f"before {i}", 100 * i + 1)
        tasks.start_soon(poison, client)
        for i in range(5):
            tasks.start_soon(innocent, client, f"after {i}", 100 * i + 1)
    for name, token_ids in ends.items():
        start = 100 * int(name[-1]) + 1
        assert token_ids == [1000 + (start + i) % 500 for i in range(500)]
    assert len(ends) == 10
    assert not is_alive(first)


_HANG = """
import sys
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
with LLM(sys.argv[1], load_format="null", heartbeat_timeout=1, max_restarts=10) as llm:
    llm.generate([[5, 6662]], SamplingParams(max_tokens=5))
"""


def test_a_worker_that_hangs_says_where(ids_only_model: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent / "poison"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _HANG, str(ids_only_model)]
    env = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "worker 0 hung: it said nothing for" in run.stderr
    assert re.search(r"\[worker 0\] Current thread .*:\n(\[worker 0\] .*\n)*.* in run_steps\n", run.stderr), run.stderr


def test_a_worker_that_always_dies_ends_the_engine(ids_only_model: Path) -> None:
    """SIGKILL blames no request, so only the count of deaths ends this."""
    config = EngineConfig(model=str(ids_only_model), load_format="null", max_restarts=2)
    with EngineProcess(config) as engine:
        deadline = time.monotonic() + 30
        while engine.process.poll() is None:
            assert time.monotonic() < deadline
            for worker in children(engine.process.pid, "worker"):
                worker.kill()
            time.sleep(0.05)
        assert engine.process.returncode == 1
        while engine.death is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "worker 0 was killed by SIGKILL; it died 3 times within 60 s" in engine.death


def test_who_asks_for_a_death_too_late_is_told(ids_only_model: Path) -> None:
    """The engine may end between its readiness and the question: then requests would wait for its return."""
    with EngineProcess(EngineConfig(model=str(ids_only_model), load_format="null")) as engine:
        engine.process.kill()
        deadline = time.monotonic() + 30
        while engine.death is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        told: list[str] = []
        engine.on_death(told.append)
        assert set(told) == {"the supervisor ended with exit code -9 and no word"}


def test_an_engine_that_is_gone_for_good_is_not_waited_for(ids_only_model: Path) -> None:
    with LLM(str(ids_only_model), load_format="null", max_lease=1) as llm:
        supervisor = llm._engine.process
        threading.Timer(0.5, supervisor.kill).start()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(EngineDied, match="the supervisor ended with exit code -9"):
                generate(llm, [[1]] * 300, SamplingParams(max_tokens=8000, ignore_eos=True))
        assert time.monotonic() - began < 10
