"""Engines that are put to sleep and woken up: their workers, which compute nothing here, who asks, and who dies."""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from covering import long
from daemon import Daemon, free_port
from engine_children import children, is_alive
from null_daemon import eventually
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, Overloaded, RequestRefused
from tercet.ipc.messages import SamplingParams
from whole_engine import generate, info, wait_until_empty

_LONG = SamplingParams(max_tokens=120, ignore_eos=True)
_WANTED = list(range(1003, 1123))
_PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def llm(ids_only_model: Path) -> Iterator[LLM]:
    """With an HTTP door, and two replicas."""
    options = {"load_format": "null", "null_step_ms": 5.0, "max_restarts": 100, "restart_window": 0.1}
    http = f"127.0.0.1:{free_port()}"
    with LLM(ids_only_model, data_parallel_size=2, http=http, heartbeat_timeout=1, **options) as llm:
        llm.url = f"http://{http}"  # type: ignore[attr-defined]
        yield llm


def pids(llm: LLM, name: str = "worker") -> list[Any]:
    return children(llm._engine.process.pid, name)


def http(llm: LLM, method: str, path: str, body: object = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    url: str = llm.url  # type: ignore[attr-defined]
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, method=method), timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def streamed(client: Client, got: list[int]) -> None:
    async for piece in client.stream(_PROMPT, _LONG):
        got += piece.token_ids


async def begun(got: list[int]) -> None:
    while len(got) < 10:
        await anyio.sleep(0.01)


def test_nothing_is_left_of_the_workers_until_it_is_woken_up(llm: LLM) -> None:
    workers = pids(llm)
    assert len(workers) == 2
    llm.sleep()
    assert not any(map(is_alive, workers))
    assert info(llm.address).is_asleep
    with pytest.raises(Overloaded, match="the engine is asleep; want it woken up") as refused:
        generate(llm, [_PROMPT], None)
    assert refused.value.code == "asleep"
    time.sleep(1.5)  # longer than a silence that counts as a hang
    assert not pids(llm)
    llm.sleep(2, mode="abort")
    llm.wake_up()
    assert not info(llm.address).is_asleep
    assert generate(llm, [_PROMPT], _LONG) == [_WANTED]
    llm.wake_up()
    assert len(pids(llm)) == 2


def test_over_http(llm: LLM) -> None:
    assert http(llm, "GET", "/is_sleeping") == (200, {"is_sleeping": False})
    assert http(llm, "POST", "/sleep?level=1&mode=wait") == (200, {"is_sleeping": True})
    assert not pids(llm)
    assert http(llm, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert http(llm, "GET", "/health")[0] == 200
    for method, path, body in (
        ("GET", "/health/ready", None),
        ("POST", "/v1/completions", {"prompt": _PROMPT}),
        ("POST", "/update_weights", {"model": "/any"}),
    ):
        status, answer = http(llm, method, path, body)
        assert status == 503
        assert "asleep" in answer["error"]["message"]
    assert http(llm, "POST", "/wake_up", {}) == (200, {"is_sleeping": False})
    assert http(llm, "GET", "/health/ready")[0] == 200
    model = str(llm._engine._ready.model)
    assert http(llm, "POST", "/update_weights", {"model": model})[1]["success"]
    assert http(llm, "POST", "/update_weights_from_disk", {"model_path": model, "abort_all_requests": True})[0] == 200
    for path, body, status, words in (
        ("/sleep?level=3", None, 400, "level"),
        ("/sleep?tags=weights", None, 400, "tags"),
        ("/sleep", {"mode": "later"}, 400, "want 'abort', 'keep', 'wait'"),
        ("/sleep?mode=keep", {"mode": "wait"}, 400, "want them in one place"),
        ("/wake_up?tags=weights", None, 400, "tags"),
        ("/wake_up", {"model": model}, 400, "want UpdateWeights"),
        ("/update_weights", {"model": "/nowhere"}, 400, "no such folder or file"),
        ("/update_weights", {}, 400, "model"),
    ):
        got, answer = http(llm, "POST", path, body)
        assert got == status
        assert words in answer["error"]["message"]
    assert http(llm, "POST", "/v1/completions", {"prompt": _PROMPT, "max_tokens": 3})[0] == 200


async def test_what_runs_ends_first_is_ended_or_goes_on(llm: LLM) -> None:
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            for mode in ("wait", "keep", "abort"):
                got: list[int] = []
                running = asyncio.ensure_future(streamed(client, got))
                await begun(got)
                await client.sleep(mode)
                before = len(got)
                if mode == "wait":
                    assert got == _WANTED
                elif mode == "abort":
                    with pytest.raises(Overloaded, match="ask again") as aborted:
                        await running
                    assert aborted.value.code == "aborted"
                else:
                    await anyio.sleep(0.3)
                    assert len(got) == before < len(_WANTED)
                await client.wake_up()
                if mode != "abort":
                    await running
                    assert got == _WANTED
    await anyio.to_thread.run_sync(wait_until_empty, llm.address)


async def test_several_ask_at_once(llm: LLM) -> None:
    """All are answered, in the order they asked."""
    answered: list[str] = []
    model = str(llm._engine._ready.model)

    async def ask(name: str, asking: Any) -> None:
        await asking
        answered.append(name)

    with anyio.fail_after(60):
        async with Client(llm.address) as client, Client(llm.address) as other:
            got: list[int] = []
            running = asyncio.ensure_future(streamed(client, got))
            await begun(got)
            asked = {
                "sleep": client.sleep(),
                "sleep again": client.sleep(),
                "wake": client.wake_up(),
                "update": client.update_weights(model),
                "sleep in the end": client.sleep("abort"),
            }
            changes = [asyncio.ensure_future(ask(name, asking)) for name, asking in asked.items()]
            await anyio.sleep(0.1)
            with pytest.raises(Overloaded, match="asleep"):
                await other.generate(_PROMPT, _LONG)
            assert await asyncio.to_thread(_status, llm, "/health/ready") == 503
            await asyncio.gather(running, *changes)
            assert got == _WANTED
            assert answered == list(asked)
            assert not pids(llm)
            await other.wake_up()


async def test_newcomers_wait_for_other_weights(llm: LLM) -> None:
    model = str(llm._engine._ready.model)
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            longer = SamplingParams(max_tokens=300, ignore_eos=True)
            running = asyncio.ensure_future(client.generate(_PROMPT, longer))
            await anyio.sleep(0.1)
            workers = pids(llm)
            change = asyncio.ensure_future(client.update_weights(model))
            await anyio.sleep(0.4)  # until the model was looked at
            late = await client.generate(_PROMPT, _LONG)
            assert running.done()
            assert late.token_ids == _WANTED
            await change
            assert pids(llm) == workers


@pytest.mark.parametrize("name", ["scheduler", "tokenizer", long("http")])
async def test_whoever_dies_it_stays_asleep(llm: LLM, name: str) -> None:
    """And what is kept goes on when it is awake."""
    got: list[int] = []
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            running = asyncio.ensure_future(streamed(client, got))
            await begun(got)
            await client.sleep("keep")
            before = pids(llm, name)
            for process in before:
                process.kill()
            while len([one for one in pids(llm, name) if one not in before]) < len(before):
                await anyio.sleep(0.02)
            await anyio.sleep(0.5)
            assert not pids(llm)
            assert (await client.info()).is_asleep
            if name == "http":
                eventually(lambda: _status(llm, "/health/ready") == 503, "the new door does not know")
            with pytest.raises(Overloaded, match="asleep"):
                while True:  # a new tokenizer takes whoever comes early for one that was there before
                    with anyio.move_on_after(0.5):
                        await client.generate(_PROMPT, _LONG)
            await client.wake_up()
            await running
    assert got == _WANTED


def _status(llm: LLM, path: str) -> int:
    try:
        return http(llm, "GET", path)[0]
    except OSError:
        return 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["tokenizer", "scheduler"])
async def test_a_change_is_made_whoever_dies_meanwhile(llm: LLM, name: str) -> None:
    """The client asks the successor; what ran when it fell asleep ends first all the same."""
    got: list[int] = []
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            running = asyncio.ensure_future(streamed(client, got))
            await begun(got)
            falling = asyncio.ensure_future(client.sleep())
            await anyio.sleep(0.1)
            for process in pids(llm, name):
                process.kill()
            await falling
            assert got == _WANTED
            assert not pids(llm)
            waking = asyncio.ensure_future(client.wake_up())
            await anyio.sleep(0.05)
            for process in pids(llm, name):
                process.kill()
            await waking
            await running
            assert (await client.generate(_PROMPT, _LONG)).token_ids == _WANTED
    assert len(pids(llm)) == 2


@pytest.mark.long
async def test_two_ranks_sleep_though_their_scheduler_dies(ids_only_model: Path) -> None:
    """Awake, they would be replaced with it."""
    with LLM(ids_only_model, load_format="null", tensor_parallel_size=2) as llm:
        async with Client(llm.address) as client:
            await client.sleep()
            (scheduler,) = pids(llm, "scheduler")
            scheduler.kill()
            with anyio.fail_after(20):
                while pids(llm, "scheduler") in ([], [scheduler]):
                    await anyio.sleep(0.02)
                await anyio.sleep(0.5)
                assert not pids(llm)
                await client.wake_up()
                assert (await client.generate(_PROMPT, _LONG)).token_ids == _WANTED


@pytest.mark.parametrize("kept", [long(False), True])
async def test_the_end_of_an_engine_that_sleeps(ids_only_model: Path, tmp_path: Path, kept: bool) -> None:
    """At once, whatever the time that running requests get."""
    flags = ("--load-format", "null", "--null-step-ms", "5", "--listen", f"ipc://{tmp_path}/engine", "--allow-changes")
    with Daemon(str(ids_only_model), *flags) as daemon:
        async with Client(daemon.address) as client:
            got: list[int] = []
            running = asyncio.ensure_future(streamed(client, got))
            await begun(got)
            await client.sleep("keep" if kept else "abort")
            if not kept:
                await asyncio.gather(running, return_exceptions=True)
            asked = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            if kept:
                with pytest.raises(Overloaded, match="shutting down"):
                    await running
            assert await asyncio.to_thread(daemon.process.wait, 20) == 0
            assert time.monotonic() - asked < 10


async def test_it_has_to_be_allowed(ids_only_model: Path, tmp_path: Path) -> None:
    with Daemon(str(ids_only_model), "--load-format", "null", "--listen", f"ipc://{tmp_path}/engine") as daemon:
        async with Client(daemon.address) as client:
            for asking in (client.sleep(), client.wake_up(), client.update_weights(str(ids_only_model))):
                with pytest.raises(RequestRefused, match="started with --allow-changes") as refused:
                    await asking
                assert refused.value.code == "not_allowed"
