"""Answers that are sent in parts, as they are made and as their clients take them.

It knows nothing of what is sent.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import chain

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tercet.engine.http_presence import ClientGone, Presence
from tercet.engine.json_parts import in_parts

Headers = Sequence[tuple[bytes, bytes]]
_JSON = (b"content-type", b"application/json")
_PART_BYTES = 2**16
"""About as much as the server keeps of one answer for a client that does not take it."""


class Stream:
    """An answer made of parts. Leaves `parts` closed, however it ends."""

    def __init__(self, parts: AsyncGenerator[bytes, None], headers: Headers) -> None:
        self._parts = parts
        self._headers = headers
        self._num_sent = 0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status waits for the first part: an exception instead of it can become another."""
        try:
            with Presence(receive, self._num_taken):
                first = await anext(self._parts, b"")
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                # What has begun is no business of the layers between here and the server, each of which would cost
                # every part. Nor does the task that sends the others wake through them.
                direct: Send = scope.get("state", {}).get("send", send)
                if first:
                    await self._send(direct, first)
                await asyncio.create_task(self._send_rest(direct))
            # Past the watch over its presence: who has had the end is gone as well.
            await direct({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:  # who perhaps only takes nothing: what waits in the server for it goes, too
            abort = scope.get("state", {}).get("abort")
            if abort is not None:
                abort()
            raise
        finally:
            await self._parts.aclose()

    async def _send_rest(self, send: Send) -> None:
        async for data in self._parts:
            await self._send(send, data)
        await self._send(send, b"")  # the server takes no more until its client has taken what came before

    async def _send(self, send: Send, data: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._num_sent += 1

    def _num_taken(self) -> int | None:
        return self._num_sent if self._is_sending else None


def json_answer(text: bytes, later: Sequence[Iterable[bytes]] = ()) -> Response | Stream:
    """A whole body, in which `later` is made as it is sent. What is short goes at once."""
    parts = _cut(in_parts(text, later))
    first, second = next(parts), next(parts, None)
    if second is None:
        return Response(first, media_type="application/json")
    headers = [_JSON] if later else [_JSON, (b"content-length", b"%d" % len(text))]
    return Stream(_in_turns(chain((first, second), parts)), headers)


def _cut(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Into pieces of one size; the last has what is left."""
    rest = bytearray()
    for part in parts:
        rest += part
        while len(rest) > _PART_BYTES:
            yield bytes(rest[:_PART_BYTES])
            del rest[:_PART_BYTES]
    yield bytes(rest)


async def _in_turns(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Everybody else has a turn after each."""
    for part in parts:
        yield part
        await asyncio.sleep(0)
