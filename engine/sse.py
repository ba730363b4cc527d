"""Server-sent events over ASGI, and the end of work that nobody waits for any more.

It knows nothing of what is sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")
_STALLED_SECONDS = 60.0
"""A client that takes nothing for so long, or twice that, has gone, whatever its connection says."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Whoever asked has left; there is nobody to answer."""


def event(data: bytes) -> bytes:
    """One event; `data` is one line."""
    return b"data: " + data + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work, or cancel it when the client leaves. Raises `ClientGone`."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        await _end(doing, leaving)


class EventStream:
    """An answer made of events. Leaves `events` closed, however it ends."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self._num_sent = 0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        # What has begun is no business of the layers between here and the server, each of which would cost every event.
        direct: Send = scope.get("state", {}).get("send", send)
        sending = asyncio.ensure_future(self._send_all(direct))
        leaving = asyncio.ensure_future(_departure(receive))
        try:
            seen = -1
            while not sending.done():
                await asyncio.wait((sending, leaving), timeout=_STALLED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                # A look now and then: a timer for each event would cost as much as all the rest.
                stalled = self._is_sending and self._num_sent == seen
                if not sending.done() and (leaving.done() or stalled):
                    raise ClientGone
                seen = self._num_sent
            sending.result()
        finally:
            await _end(sending, leaving)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async for data in self._events:
            self._is_sending = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._is_sending = False
            self._num_sent += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    waiting: Awaitable[Any] = asyncio.gather(*tasks, return_exceptions=True)
    await waiting
