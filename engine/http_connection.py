"""One connection to the HTTP door: requests that are bounded in size and in time, each answered in its turn.

uvicorn reads and writes them. It knows no route.
"""

import asyncio
import re
from collections import deque
from http import HTTPStatus
from typing import Any

import msgspec
from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tercet.engine.http_body import MAX_BODY_BYTES
from tercet.engine.http_errors import ApiError

_MOST_HEADER_BYTES = 32 * 2**10
_HEADER_SECONDS = 30.0
"""From a connection's first byte, or its beginning, to the end of a request's headers."""
_MOST_BYTES_AHEAD = MAX_BODY_BYTES + _MOST_HEADER_BYTES
"""Of what is read while an answer is due: as much as one more request may have."""
_PART_BYTES = 2**16
_TOO_LARGE = ApiError(431, f"the headers have more than {_MOST_HEADER_BYTES} bytes", code="headers_too_large")
_TOO_SLOW = ApiError(408, f"the headers did not come within {_HEADER_SECONDS:g} s", code="headers_too_slow")
_NO_HTTP = ApiError(400, "what came cannot be read as a request of HTTP/1.1", code="invalid_http")
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """Its errors are those of every route.

    What comes while an answer is due is read, since only who reads sees the client leave, and kept until its turn.
    uvicorn by itself stops reading there, and tells the last request only that the client has left.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._num_header_bytes = 0
        self._in_headers = True
        self._is_between = True
        """Nothing of the next request has come."""
        self._too_late: asyncio.TimerHandle | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests whose headers have come. There are more than one where they came in one piece."""
        self._ahead = bytearray()
        self._refusal: ApiError | None = None
        """Of what came behind a request, to be said behind its answer."""
        self._expect_headers()

    @property
    def _is_due(self) -> bool:
        """Whether an answer has to come before more is asked; the first request's own body may still be coming."""
        return len(self._unanswered) > 1 or (bool(self._unanswered) and not self._unanswered[0].more_body)

    def data_received(self, data: bytes) -> None:
        self._ahead += data
        self._read_on()

    def _read_on(self) -> None:
        while self._ahead and not (self._is_due or self._refusal or self.transport.is_closing()):
            part = bytes(self._ahead[:_PART_BYTES])
            del self._ahead[:_PART_BYTES]
            self._read(part)
        if self._refusal is not None:
            self._ahead.clear()
            if not self._is_due:
                self._refuse(self._refusal)
        if len(self._ahead) > _MOST_BYTES_AHEAD:
            self.flow.pause_reading()
        elif self._is_due:
            self.flow.resume_reading()

    def _read(self, data: bytes) -> None:
        if self._is_between and not data.strip(b"\r\n"):
            return  # some send an empty line behind a body
        if self._in_headers:
            if self._too_late is None:
                self._expect_headers()
            # Bytes of the body may be among them; what comes in one piece is small.
            self._num_header_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_headers and self._num_header_bytes > _MOST_HEADER_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._is_between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > _MOST_HEADER_BYTES:
            self._refuse(_TOO_LARGE)
            raise HttpParserError("headers too large")
        self._in_headers = False
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _Unchunked(self.cycle).send  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._is_between, self._num_header_bytes = True, True, 0

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._ahead.clear()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._too_late = self.loop.call_later(_HEADER_SECONDS, self._refuse, _TOO_SLOW)

    def send_400_response(self, msg: str) -> None:
        """What the parser has stopped at, unless it has been answered."""
        self._refuse(_NO_HTTP)

    def _refuse(self, error: ApiError) -> None:
        if self._is_due:
            self._refusal = self._refusal or error
            return
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error.reply)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Unchunked:
    """Sends an answer to HTTP/1.0, which knows no chunks: one whose length is not known ends with its connection.

    uvicorn closes that one, but has chunks for everybody.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
        if not self._has_length:
            self._cycle.chunked_encoding = False
            self._cycle.expected_content_length = len(message.get("body", b""))  # so no part is too much, or too little
        await self._send(message)


def _without_upgrade(data: bytes) -> bytes:
    """What comes while headers do, asking for no other protocol than this one.

    Java's client offers HTTP/2 that way, and curl if told to. We may ignore that; but our parser would then ignore the
    request's body.
    """
    end = data.find(b"\r\n\r\n")
    head, rest = (data, b"") if end < 0 else (data[:end], data[end:])
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + rest
