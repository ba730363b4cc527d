"""Work for a client ends with the client's leaving, in the task that does it, and with nothing else changed."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from tercet.engine import http_presence
from tercet.engine.http_presence import ClientGone, Presence, unless_gone
from tercet.engine.sse import EventStream


class Peer:
    """The other end of one request, as the server shows it."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Message] = []
        self.senders: list[Any] = []

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.senders.append(asyncio.current_task())
        if message.get("more_body") is False:
            self.left.set()  # as uvicorn has it: who has had everything is gone
            await asyncio.sleep(0.01)

    @property
    def body(self) -> bytes:
        return b"".join([message.get("body", b"") for message in self.sent])


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_work_that_is_done_first() -> None:
    peer = Peer()
    before = asyncio.all_tasks()

    async def work() -> object:
        await asyncio.sleep(0.01)
        return asyncio.current_task()

    assert await unless_gone(peer.receive, work()) is asyncio.current_task()
    peer.left.set()  # too late to matter
    await settle()
    assert asyncio.all_tasks() == before


async def test_leaving_ends_the_work_where_it_is() -> None:
    peer, ends = Peer(), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    asyncio.get_running_loop().call_later(0.01, peer.left.set)
    with pytest.raises(ClientGone):
        await unless_gone(peer.receive, work())
    assert ends == ["cancelled"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.01)  # and nothing is left to be thrown here


async def test_other_ends_stay_what_they_are() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless_gone(Peer().receive, fail())
    waiting = asyncio.create_task(unless_gone(Peer().receive, asyncio.sleep(60)))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_leaving_in_the_turn_in_which_the_work_is_done() -> None:
    """Whichever is seen first: the task goes on afterwards as if it had never been cancelled."""
    for lead in range(4):
        peer, done = Peer(), asyncio.get_running_loop().create_future()

        async def part(peer: Peer = peer, done: "asyncio.Future[int]" = done, lead: int = lead) -> None:
            await settle()
            peer.left.set()
            for _ in range(lead):
                await asyncio.sleep(0)
            if not done.cancelled():
                done.set_result(5)

        parting = asyncio.create_task(part())
        with contextlib.suppress(ClientGone):
            assert await unless_gone(peer.receive, done) == 5
        await parting
        await settle()


async def test_one_that_takes_nothing_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_presence, "_STALLED_SECONDS", 0.05)
    num_taken: list[int | None] = [None]
    loop = asyncio.get_running_loop()
    began = loop.time()
    ticks = [loop.call_later(0.02 * tick, num_taken.__setitem__, 0, tick) for tick in range(1, 11)]  # to 0.2 s
    with pytest.raises(ClientGone), Presence(Peer().receive, lambda: num_taken[0]):
        await asyncio.sleep(30)
    assert loop.time() - began > 0.2
    del ticks
    with Presence(Peer().receive):  # nothing is being sent: it may take as long as it likes
        await asyncio.sleep(0.2)


async def numbers(count: int, closed: list[int], pause: Callable[[], Awaitable[None]]) -> AsyncGenerator[bytes, None]:
    try:
        for number in range(count):
            yield b"%d " % number
            await pause()
    finally:
        closed.append(count)


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_all_events_in_order_and_the_first_at_once(count: int) -> None:
    peer, closed = Peer(), []
    await EventStream(numbers(count, closed, settle))({}, peer.receive, peer.send)
    assert peer.sent[0]["type"] == "http.response.start"
    assert peer.body == b"".join(b"%d " % number for number in range(count))
    assert [message.get("more_body", True) for message in peer.sent] == [True] * (count + 2) + [False]
    assert peer.senders[: 1 + min(count, 1)] == [asyncio.current_task()] * (1 + min(count, 1)), "no task in between"
    assert closed == [count]


async def test_leaving_closes_the_events() -> None:
    for turns in (1, 30, 60):  # within the first event, or later ones
        peer, closed = Peer(), []
        streaming = asyncio.create_task(EventStream(numbers(10**6, closed, settle))({}, peer.receive, peer.send))
        for _ in range(turns):
            await asyncio.sleep(0)
        peer.left.set()
        with pytest.raises(ClientGone):
            await streaming
        assert closed == [10**6]
