"""What the async client makes of an engine that refuses, drains, gives up, dies or hangs: exceptions of one tree."""

import asyncio
import contextlib
import copy
import os
import signal
import time
from array import array

import msgspec
import pytest

from played_scheduler import aborted, ended, play, submitted
from tercet.ipc import connected
from tercet.ipc.client import (
    Client,
    ClientError,
    EngineDied,
    Generation,
    Overloaded,
    RequestRefused,
    RequestTimedOut,
)
from tercet.ipc.messages import ChatMessage, SamplingParams
from tercet.ipc.process_messages import Abandon, Drain
from tercet.ipc.step_messages import Unservable
from tokenizer_process import USAGE, TokenizerProcess


async def test_refusals_are_exceptions_with_reasons(engine: TokenizerProcess, client: Client) -> None:
    with pytest.raises(RequestRefused, match=r"top_p is 2\.0") as refused:
        await client.generate("x", SamplingParams(top_p=2))
    assert refused.value.code == "invalid_request"
    with pytest.raises(RequestRefused, match="at least 1 token"):
        async for _ in client.stream([]):
            pass
    for prompt in (None, b"text", [1.5], [1, True], (False,), [{"role": "user"}]):
        with pytest.raises(ValueError, match="want a str, int32 token ids, or ChatMessages"):
            await client.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"params is \{'top_p': 1\}; want SamplingParams"):
        await client.generate("x", {"top_p": 1})  # type: ignore[arg-type]
    for answer in (client.generate, client.tokenize):
        with pytest.raises(RequestRefused, match="got `int`"):
            await asyncio.wait_for(answer([ChatMessage("user", 5)]), 10)  # type: ignore[arg-type]
    running = asyncio.ensure_future(client.generate("beside"))
    beside = await submitted(engine)
    for ask in (client.generate, client.tokenize):
        with pytest.raises(RequestRefused, match="want at most 16777216"):
            await ask("x" * 17_000_000)
    with pytest.raises(RequestRefused, match="want at most 16777216"):
        await client.detokenize(array("i", bytes(17_000_000)))
    engine.sample(beside.number, "on", ended(beside))  # it would not know this number on a new connection
    assert (await running).text == "on"
    task = asyncio.ensure_future(client.generate("x"))
    submit = await submitted(engine)
    engine.send(Unservable(submit.number, "too_long_for_cache", "needs 9 pages of 4"))
    with pytest.raises(RequestRefused, match="9 pages of 4"):
        await task


async def test_a_draining_engine_takes_no_more(engine: TokenizerProcess, client: Client) -> None:
    running = asyncio.ensure_future(client.generate("x"))
    submit = await submitted(engine)
    engine.tell(Drain())
    with pytest.raises(Overloaded, match="shutting down") as caught:
        async with asyncio.timeout(10):
            while True:  # the command comes by another way than requests
                with contextlib.suppress(RequestTimedOut):
                    await client.generate("x", timeout=0.1)
    assert caught.value.retry_after == 1.0
    engine.sample(submit.number, "end", ended(submit))
    assert (await running).text == "end"


async def test_an_engine_that_gives_up_says_why(engine: TokenizerProcess, client: Client) -> None:
    task = asyncio.ensure_future(client.generate("x"))
    await submitted(engine)
    engine.tell(Abandon("worker 0 ran out of memory"))
    with pytest.raises(EngineDied, match="worker 0 ran out of memory"):
        await task


async def test_an_engine_that_is_killed(engine: TokenizerProcess) -> None:
    async with Client(engine.address, connect_timeout=0.5, reconnect_timeout=0) as client:
        tasks = [asyncio.ensure_future(client.generate("x")) for _ in range(3)]
        for _ in tasks:
            await submitted(engine)
        engine.process.kill()
        began = time.monotonic()
        for task in tasks:
            with pytest.raises(EngineDied, match="closed the connection"):
                await task
        with pytest.raises(EngineDied, match="nothing listens"):
            await client.generate("x")
        with pytest.raises(EngineDied, match="nothing answers"):
            await client.info()
        assert time.monotonic() - began < 5


async def test_an_engine_that_is_gone_holds_no_client(engine: TokenizerProcess) -> None:
    """What waits to be sent when it closes has nobody to go to."""
    async with Client(engine.address) as client:
        waiting = asyncio.ensure_future(client.generate("x"))
        await submitted(engine)
        engine.process.kill()
        while client._line.lost_at is None:
            await asyncio.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 0.3
    with pytest.raises(EngineDied, match="was closed"):
        await waiting


async def test_what_is_asked_while_the_engine_is_away(engine: TokenizerProcess) -> None:
    """It waits for its return no longer than it may, nor when that is known not to come."""
    async with Client(engine.address) as client:
        running = asyncio.ensure_future(client.generate("x", timeout=1))
        await submitted(engine)
        engine.process.kill()
        engine.process.wait()
        for ask in (client.generate("x", timeout=0.2), anext(client.stream("x", timeout=0.2))):
            with pytest.raises(RequestTimedOut, match=r"0\.2 s"):
                await asyncio.wait_for(ask, 10)
        with pytest.raises(RequestTimedOut, match="1 s"):
            await asyncio.wait_for(running, 10)
        waiting = asyncio.ensure_future(client.generate("x", timeout=30))
        await asyncio.sleep(0.1)
        client.give_up("it is known to be dead")
        with pytest.raises(EngineDied, match="known to be dead"):
            await asyncio.wait_for(waiting, 10)


async def test_leaving_the_client_while_the_engine_is_away(engine: TokenizerProcess) -> None:
    async with Client(engine.address) as client:
        engine.process.kill()
        engine.process.wait()
        waiting = asyncio.ensure_future(client.generate("x"))
        await asyncio.sleep(0.1)
    with pytest.raises(EngineDied, match="the client was closed"):
        await asyncio.wait_for(waiting, 10)


async def test_an_engine_that_hangs(engine: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected, "_PING_S", 0.1)
    monkeypatch.setattr(connected, "_SILENCE_S", 0.5)
    async with Client(engine.address) as client:
        slow = asyncio.ensure_future(client.generate("x"))
        submit = await submitted(engine)
        await asyncio.sleep(1.2)  # pings are answered: slow is not dead
        assert not slow.done()
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineDied, match="said nothing"):
                await asyncio.wait_for(slow, 5)
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)
        # It was only asleep: what it still has to say is for nobody, and it is told so.
        engine.sample(submit.number, "late")
        assert await aborted(engine) == submit.number
        again = asyncio.ensure_future(client.generate("y"))
        await play(engine, "back")
        assert (await again).text == "back"


async def test_a_program_that_slept_does_not_take_its_engine_for_dead(
    engine: TokenizerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has asked the engine whether it is there, nor listened: it owes an answer, and has none yet."""
    monkeypatch.setattr(connected, "_PING_S", 0.3)
    monkeypatch.setattr(connected, "_SILENCE_S", 2.0)
    async with Client(engine.address) as client:
        slow = asyncio.ensure_future(client.generate("x"))
        submit = await submitted(engine)
        asleep_until = time.monotonic() + 2.5
        while time.monotonic() < asleep_until:
            time.sleep(0.1)
        woke_at = asyncio.get_running_loop().time()
        while client.last_heard < woke_at and not slow.done():  # until a ping is answered
            await asyncio.sleep(0.05)
        assert not slow.done()
        engine.sample(submit.number, "here", ended(submit))
        assert (await slow).text == "here"


@pytest.mark.parametrize(
    "error", [RequestRefused("a", "b"), Overloaded("a", "b", 2.5), EngineDied("a", "b"), RequestTimedOut("a", "b")]
)
def test_they_come_whole_out_of_other_processes(error: ClientError) -> None:
    """As from a pool's, which would break: they are made anew there."""
    again = copy.copy(error)
    assert (type(again), str(again), vars(again)) == (type(error), "b", vars(error))


def test_one_small_tree() -> None:
    for kind in (RequestRefused, Overloaded, EngineDied, RequestTimedOut):
        assert issubclass(kind, ClientError)
    assert issubclass(RequestTimedOut, TimeoutError)
    assert msgspec.json.encode(Generation("x", [1], "length", None, USAGE))
