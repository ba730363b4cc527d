"""From the engine's pieces to the events of a stream, whatever shape a chunk has.

Most pieces are a word and nothing else. Such an event differs from the one before in its text only, so the bytes around
it are made once.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Generic, TypeVar

import msgspec

from tercet.engine.http_answer import Answer, Indexed
from tercet.engine.http_errors import from_engine
from tercet.engine.openai_answers import Usage
from tercet.engine.openai_requests import UsageWanted
from tercet.engine.sse import DONE, event, one_line
from tercet.ipc.client import ClientError, Generation, Piece

Choice = TypeVar("Choice")

_encode = msgspec.json.Encoder().encode
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


class Chunks(ABC, Generic[Choice]):
    """What a piece becomes."""

    @abstractmethod
    def choices(self, index: int, piece: Piece) -> list[Choice]:
        """Each of these is sent in a chunk of its own; none where there is nothing to say."""

    @abstractmethod
    def is_plain(self, index: int, piece: Piece) -> bool:
        """Whether `choices` would be one, with the piece's text and no other news; it need not be called then."""

    @abstractmethod
    def plain_choice(self, index: int, text: str) -> Choice:
        """That one."""

    @abstractmethod
    def chunk(self, choices: list[Choice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        """One chunk, as JSON."""


async def events(
    pieces: AsyncGenerator[Indexed, None],
    chunks: Chunks[Choice],
    answer: Answer,
    usage_wanted: UsageWanted,
    names: Mapping[str, str],
) -> AsyncGenerator[bytes, None]:
    """All chunks; then usage if wanted; then the end. A failure on the way is an event as well.

    What is refused at once, before there is any event, is raised as an `ApiError`: it can still become a status.
    """
    has_begun = False
    ended: dict[int, Generation] = {}
    num_generated = 0
    told: Usage | msgspec.UnsetType | None = msgspec.UNSET if usage_wanted == "never" else None
    around: dict[int, tuple[bytes, bytes]] = {}
    """The text of a plain event, by index."""
    async with contextlib.aclosing(pieces), _counted(answer, usage_wanted) as num_prompt:
        try:
            async for index, piece in pieces:
                num_generated += len(piece.token_ids)
                if num_prompt is not None:
                    told = Usage(await num_prompt, num_generated, await num_prompt + num_generated)
                has_begun = True
                if piece.generation is not None:
                    ended[index] = piece.generation
                if num_prompt is None and chunks.is_plain(index, piece):
                    if index not in around:
                        around[index] = _split(chunks.chunk([chunks.plain_choice(index, _MARK)], told))
                    before, after = around[index]
                    yield before + one_line(_encode(piece.text)) + after
                elif choices := chunks.choices(index, piece):
                    yield b"".join([event(chunks.chunk([choice], told)) for choice in choices])
            usage = answer.usage([ended[index] for index in sorted(ended)])
            if usage_wanted != "never":
                yield event(chunks.chunk([], usage))
        except ClientError as error:
            if not has_begun:
                raise from_engine(error, names) from None
            answer.note_failure(error.code)
            yield event(msgspec.json.encode(from_engine(error, names).reply))
        yield DONE


@contextlib.asynccontextmanager
async def _counted(answer: Answer, usage_wanted: UsageWanted) -> AsyncGenerator[Awaitable[int] | None, None]:
    """The prompts' tokens, if each chunk tells of them; counted behind the request, before it is answered."""
    if usage_wanted != "always":
        yield None
        return
    counting = asyncio.ensure_future(answer.count_prompt_tokens())
    try:
        yield counting
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


def _split(chunk: bytes) -> tuple[bytes, bytes]:
    """An event's bytes before and after its text, which is what a chunk has last of all that is free to be anything."""
    before, _, after = event(chunk).rpartition(_encode(_MARK))
    return before, after
