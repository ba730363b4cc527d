"""Server-sent events over ASGI.

It knows nothing of what is sent.
"""

from collections.abc import AsyncGenerator

from tercet.engine.http_stream import Stream

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` is one line."""
    return b"data: " + data + b"\n\n"


class EventStream(Stream):
    """An answer made of events."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, _HEADERS)
