"""The answer to one HTTP request: a request to the engine for each prompt, all their answers told apart by an index.

It asks, measures and gathers; in what shape a client reads it is decided elsewhere.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request

from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError
from tercet.engine.metrics import measured
from tercet.engine.openai_answers import PromptTokensDetails, Usage
from tercet.engine.openai_requests import Sampled
from tercet.engine.request_log import Record
from tercet.ipc.client import ClientError, Generation, Piece
from tercet.ipc.messages import ChatMessage, ChatOptions, SamplingParams
from tercet.ipc.prompt import PlainPrompt

Indexed = tuple[int, Piece]
_MOST_CHOICES = 256


class Answer:
    """What all parts of the answer have in common, and how to get them."""

    def __init__(
        self,
        request: Request,
        door: Door,
        prefix: str,
        prompts: Sequence[PlainPrompt],
        params: SamplingParams,
        body: Sampled,
        options: ChatOptions | None = None,
    ) -> None:
        door.check_open()
        self.id = prefix + uuid.uuid4().hex
        self.created = int(time.time())
        adapter = door.adapter_of(body.model)
        self.model = adapter or door.info.model
        self._door = door
        self._handling: dict[str, Any] = {
            "cache_salt": body.cache_salt or "",
            "priority": body.priority or 0,
            "queue_timeout": body.queue_timeout,
            "timeout": body.timeout,
            "return_prompt_ids": bool(body.return_token_ids),
            "options": options,
        }
        self._num_each = _num_choices(body.n, len(prompts), door.most_answers)
        self._params = msgspec.structs.replace(params, n=self._num_each, adapter=adapter)
        self._prompts = prompts
        self._record: Record = request.state.record
        self._record.answer_id, self._record.stream = self.id, bool(body.stream)
        self._record.user, self._record.safety_identifier = body.user, body.safety_identifier
        self._record.metadata = body.metadata

    async def whole(self) -> list[Generation]:
        """All answers, in the order of the prompts; if one fails, all are cancelled."""
        tasks = [asyncio.ensure_future(self._generate(prompt)) for prompt in self._prompts]
        try:
            return [one for each in await asyncio.gather(*tasks) for one in each]
        finally:
            for task in tasks:
                task.cancel()

    def pieces(self) -> AsyncGenerator[Indexed, None]:
        """All answers as they come."""
        streams = [self._stream(place * self._num_each, prompt) for place, prompt in enumerate(self._prompts)]
        return streams[0] if len(streams) == 1 else _merged(streams)

    def usage(self, generations: Sequence[Generation]) -> Usage:
        """Of all answers together, in their order; a prompt that is answered several times counts once."""
        num_prompt = sum(one.usage.num_prompt_tokens for one in generations[:: self._num_each])
        num_cached = sum(one.usage.num_cached_tokens for one in generations[:: self._num_each])
        num_generated = sum(one.usage.num_generated_tokens for one in generations)
        record = self._record
        record.prompt_tokens, record.cached_tokens, record.completion_tokens = num_prompt, num_cached, num_generated
        record.finish_reasons = [one.reason for one in generations]
        return Usage(num_prompt, num_generated, num_prompt + num_generated, PromptTokensDetails(num_cached))

    def prompt_of(self, index: int) -> int:
        """Which prompt an answer is to."""
        return index // self._num_each

    async def count_prompt_tokens(self) -> int:
        """What `usage` will say of them at the end."""
        return sum([await self._count_tokens(prompt) for prompt in self._prompts])

    def note_failure(self, code: str) -> None:
        """For the log: it failed after its status was sent."""
        self._record.error = code

    async def _count_tokens(self, prompt: PlainPrompt) -> int:
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            return len(prompt)
        text_or_turns = cast("str | Sequence[ChatMessage]", prompt)
        return len(await self._door.client.tokenize(text_or_turns, options=self._handling["options"]))

    async def _generate(self, prompt: PlainPrompt) -> list[Generation]:
        with measured(self._door.metrics, self._num_each) as timers:
            generations = await self._door.client.generate_several(prompt, self._params, **self._handling)
            for index, generation in enumerate(generations):
                timers.pop(index).end_whole(generation)
        return generations

    async def _stream(self, first: int, prompt: PlainPrompt) -> AsyncGenerator[Indexed, None]:
        """Of one prompt, whose answers are those from the `first` on."""
        with measured(self._door.metrics, self._num_each) as timers:
            stream = _generator(self._door.client, prompt, self._params, self._handling)
            async with contextlib.aclosing(stream) as pieces:
                async for piece in pieces:
                    timers[piece.index].add(len(piece.token_ids))
                    if piece.generation is not None:
                        timers.pop(piece.index).end(piece.generation)
                    yield first + piece.index, piece


async def _merged(streams: Sequence[AsyncGenerator[Indexed, None]]) -> AsyncGenerator[Indexed, None]:
    """What comes of any of them, as it comes."""
    merged: asyncio.Queue[Indexed | ClientError | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_forward(stream, merged)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            match await merged.get():
                case None:
                    running -= 1
                case ClientError() as error:
                    raise error
                case indexed:
                    yield indexed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _generator(client: Any, *arguments: Any) -> AsyncGenerator[Piece, None]:
    """The client's streams are generators, and can be closed."""
    prompt, params, handling = arguments
    stream: AsyncIterator[Piece] = client.stream(prompt, params, **handling, keep_logprobs=False)
    assert isinstance(stream, AsyncGenerator)
    return stream


async def _forward(stream: AsyncGenerator[Indexed, None], to: "asyncio.Queue[Indexed | ClientError | None]") -> None:
    try:
        async with contextlib.aclosing(stream) as pieces:
            async for indexed in pieces:
                to.put_nowait(indexed)
        to.put_nowait(None)
    except ClientError as error:
        to.put_nowait(error)


def _num_choices(n: int | None, num_prompts: int, most_at_once: int) -> int:
    """Of each prompt."""
    n = 1 if n is None else n
    if not 1 <= n <= _MOST_CHOICES // num_prompts:
        raise ApiError(400, f"n is {n}; want 1 to {_MOST_CHOICES // num_prompts} with {num_prompts} prompts", param="n")
    if num_prompts > 1 and n * num_prompts > most_at_once:  # of one prompt the engine says so itself
        text = f"prompt has {num_prompts} of them, with {n} answers each; want at most {most_at_once} answers in all"
        raise ApiError(400, f"{text}: --max-num-seqs and --max-queued-requests", param="prompt")
    return n
