"""Server-sent events over ASGI.

It knows nothing of what is sent.
"""

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Receive, Scope, Send

from tercet.engine.http_presence import Presence

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` is one line."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """An answer made of events. Leaves `events` closed, however it ends."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self._num_sent = 0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status waits for the first event: an exception instead of it can become another."""
        try:
            with Presence(receive, self._num_taken):
                first = await anext(self._events, b"")
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                # What has begun is no business of the layers between here and the server, each of which would cost
                # every event. Nor does the task that sends the others wake through them.
                direct: Send = scope.get("state", {}).get("send", send)
                if first:
                    await self._send(direct, first)
                await asyncio.create_task(self._send_rest(direct))
            # Past the watch over its presence: who has had the end is gone as well.
            await direct({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()

    async def _send_rest(self, send: Send) -> None:
        async for data in self._events:
            await self._send(send, data)

    async def _send(self, send: Send, data: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._num_sent += 1

    def _num_taken(self) -> int | None:
        return self._num_sent if self._is_sending else None
