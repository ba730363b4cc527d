"""From the engine's pieces to the events of a stream, whatever shape a chunk has."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

import msgspec

from tercet.engine.http_answer import Answer, Indexed
from tercet.engine.http_errors import from_engine
from tercet.engine.openai_responses import Usage
from tercet.engine.sse import DONE, event
from tercet.ipc.client import ClientError, Generation, Piece

Choice = TypeVar("Choice")


class Chunks(ABC, Generic[Choice]):
    """What a piece becomes."""

    @abstractmethod
    def choices(self, index: int, piece: Piece) -> list[Choice]:
        """Each of these is sent in a chunk of its own; none where there is nothing to say."""

    @abstractmethod
    def chunk(self, choices: list[Choice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        """One chunk, as JSON."""


async def events(
    pieces: AsyncGenerator[Indexed, None], chunks: Chunks[Choice], answer: Answer, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """All chunks; then usage if wanted; then the end. A failure on the way is an event as well."""
    ended: dict[int, Generation] = {}
    no_usage = None if with_usage else msgspec.UNSET
    async with contextlib.aclosing(pieces):
        try:
            async for index, piece in pieces:
                if piece.generation is not None:
                    ended[index] = piece.generation
                if choices := chunks.choices(index, piece):
                    yield b"".join([event(chunks.chunk([choice], no_usage)) for choice in choices])
            usage = answer.usage([ended[index] for index in sorted(ended)])
            if with_usage:
                yield event(chunks.chunk([], usage))
        except ClientError as error:
            answer.note_failure(error.code)
            yield event(msgspec.json.encode(from_engine(error, "prompt").reply))
        yield DONE
