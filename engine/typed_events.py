"""From the engine's pieces to the events of a stream that have types: those of OpenAI's Responses and of Anthropic's.

What they tell is somebody else's matter, and so is the plain kind of chunks (`http_events.py`).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping

import msgspec

from tercet.engine.http_answer import Answer
from tercet.engine.http_errors import ApiError, from_engine
from tercet.engine.sse import event
from tercet.ipc.client import ClientError, Piece

_encode = msgspec.json.Encoder().encode


class Teller(ABC):
    """Of one answer. An event is a structure whose tag is its type."""

    @abstractmethod
    def begin(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """What stands ahead of all that is said, when the first of it is there."""

    @abstractmethod
    async def go_on(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """What is new; with the last piece, the end."""

    @abstractmethod
    def fail(self, error: ApiError) -> msgspec.Struct:
        """The end, if it fails on the way."""


async def typed_events(answer: Answer, teller: Teller, names: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    """All events. What is refused at once, before there is any, is raised as an `ApiError`: it can still become a
    status."""
    has_begun = False
    async with contextlib.aclosing(answer.pieces()) as pieces:
        try:
            async for _, piece in pieces:
                told = [] if has_begun else [*teller.begin(piece)]
                has_begun = True
                told += await teller.go_on(piece)
                if told:
                    yield b"".join(map(_written, told))
        except ClientError as error:
            if not has_begun:
                raise from_engine(error, names) from None
            answer.note_failure(error.code)
            yield _written(teller.fail(from_engine(error, names)))


def _written(told: msgspec.Struct) -> bytes:
    return event(_encode(told), str(told.__struct_config__.tag).encode())
