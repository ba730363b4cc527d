"""Server-sent events over ASGI.

It knows nothing of what is sent, but that it is JSON.
"""

from collections.abc import AsyncGenerator

from tercet.engine.http_stream import Stream

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DONE = b"data: [DONE]\n\n"
_BREAKS = [(mark.encode(), b"\\u%04x" % ord(mark)) for mark in "\x85\u2028\u2029"]


def event(data: bytes, name: bytes = b"") -> bytes:
    """One event; `data` is JSON in one line. `name`: where clients tell kinds of events apart by it."""
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + one_line(data) + b"\n\n"


def one_line(data: bytes) -> bytes:
    """JSON that is one line to everybody: Python's `splitlines`, with which some clients read, knows more ends than
    JSON escapes."""
    if not data.isascii():
        for mark, escaped in _BREAKS:
            data = data.replace(mark, escaped)
    return data


class EventStream(Stream):
    """An answer made of events."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, _HEADERS)
