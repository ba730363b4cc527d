"""A connection to an HTTP server: a request, and the body of its answer as it arrives; then the next request.

A few lines of HTTP/1.1: whatever package is installed, a load test's own part is small. Each read is stamped once,
before anything is made of it. It knows nothing of what a body holds.
"""

import asyncio
import re
import time
from collections.abc import Callable

Take = Callable[[bytes, float], None]
"""A part of a body, and when it came."""

_MOST_AT_ONCE = 65_536


class Exchange(asyncio.BufferedProtocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        # One buffer for good: asyncio's streams allocate 256 KiB for each read, however little comes.
        self._buffer = memoryview(bytearray(_MOST_AT_ONCE))
        self._answer: _Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.can_serve = False
        """Whether the last answer has been read to its end, and the connection outlives it."""

    async def ask(self, request: bytes, take: Take) -> None:
        """`take` each part of the body. Raises `ValueError` unless the status is 200, and as `take` does."""
        assert self._transport is not None
        self.can_serve = False
        self._answer, self._done = _Answer(take), asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._done
        finally:
            self._answer = self._done = None
            if not self.can_serve:
                self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        now = time.monotonic()
        answer = self._answer
        if answer is None:  # nobody asked: it cannot be trusted with another request
            self._fail(ValueError("bytes came that belong to no answer"))
            return
        try:
            answer.add(bytes(self._buffer[:num_bytes]), now)
        except (OSError, EOFError, ValueError) as error:
            self._fail(error)
            return
        if answer.is_whole:
            self.can_serve = answer.keeps_connection
            self._succeed()

    def eof_received(self) -> None:
        answer = self._answer
        if answer is not None and answer.ends_with_connection:
            try:
                answer.end()
            except ValueError as error:
                self._fail(error)
                return
            self._succeed()

    def connection_lost(self, error: Exception | None) -> None:
        self.can_serve = False
        self._fail(error or EOFError("the connection ended within an answer"))

    def _succeed(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.can_serve = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class _Answer:
    """From bytes to parts of a body: what chunks hold, or so many bytes, or all until the connection ends."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._rest = b""
        self._is_chunked = False
        self._num_left: int | None = None
        self._refusal: bytearray | None = None
        self._status = ""
        self.is_whole = self.keeps_connection = self.ends_with_connection = False

    def add(self, data: bytes, now: float) -> None:
        """Raises `ValueError` once an answer is whole whose status is not 200."""
        data = self._rest + data if self._rest else data
        if not self._status:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            self._begin(head.decode("latin-1").lower())
        self._rest = b""
        if self._is_chunked:
            self._add_chunks(data, now)
        else:
            self._add_plain(data, now)
        if self.is_whole:
            self.end()

    def end(self) -> None:
        """Nothing more comes."""
        if self._refusal is not None:
            raise ValueError(f"HTTP {self._status}: {self._refusal.decode(errors='replace')[:300]}")

    def _begin(self, head: str) -> None:
        found = re.match(r"http/\S+ +(\d{3})\b", head)
        self._status = found[1] if found else "?"
        if self._status != "200":
            self._refusal = bytearray()
        self._is_chunked = "transfer-encoding: chunked" in head
        if found := re.search(r"content-length: *(\d+)", head):
            self._num_left = int(found[1])
        self.ends_with_connection = not self._is_chunked and self._num_left is None
        self.keeps_connection = not self.ends_with_connection and "connection: close" not in head

    def _add_chunks(self, data: bytes, now: float) -> None:
        start = 0
        while (end := data.find(b"\r\n", start)) >= 0:
            size = int(data[start:end].split(b";")[0], 16)
            behind = end + 2 + size + 2
            if len(data) < behind:
                break
            if not size:
                self.is_whole = True
                return
            self._hand_over(data[end + 2 : behind - 2], now)
            start = behind
        self._rest = data[start:]

    def _add_plain(self, data: bytes, now: float) -> None:
        if data:
            self._hand_over(data, now)
        if self._num_left is not None:
            self._num_left -= len(data)
            self.is_whole = self._num_left <= 0

    def _hand_over(self, part: bytes, now: float) -> None:
        if self._refusal is None:
            self._take(part, now)
        else:
            self._refusal += part
