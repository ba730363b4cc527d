"""What a client gets back: a `Generation` or several, piece by piece or whole, or one of a few errors.

A `Call` collects the answers to one request. It knows no socket.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from tercet.ipc.answers import Delta, Failed, Finished, FinishReason, Logprobs, PromptIds, PromptLogprobs, Usage
from tercet.ipc.messages import Request
from tercet.ipc.rows import PackedRows, Row

Result = TypeVar("Result")

_MOST_AT_ONCE = 64
"""Parts of an answer that are handed out before other tasks have a turn."""


class ClientError(Exception):
    """What a client may have to deal with. `code` is the engine's word for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:  # its `args` hold the message alone; else no worker process could raise it
        return type(self), (self.code, str(self)), self.__dict__


class RequestRefused(ClientError):
    """The request cannot be served as it is; the message says what to change."""


class Overloaded(ClientError):
    """The engine takes no more now; ask again later, or elsewhere."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(code, message)
        self.retry_after = retry_after
        """Seconds after which it is worth asking again, where the engine knows."""


class EngineDied(ClientError):
    """The engine is gone, was never there, or speaks another protocol; what it had not sent is lost."""


class RequestTimedOut(ClientError, TimeoutError):
    """The request waited or took longer than the caller allowed, and was cancelled."""


class Generation(msgspec.Struct, frozen=True):
    """A finished answer."""

    text: str
    token_ids: list[int]
    reason: FinishReason
    stop: str | int | None
    """The stop string or token id that ended it, if one did."""
    usage: Usage
    logprobs: Sequence[Row] | None = None
    """Of each token, if they were asked for. Unpacked anew at each look."""
    prompt_logprobs: Sequence[Row] | None = None
    """The same of the prompt's tokens from the second on; of several answers, the first has them."""
    prompt_token_ids: list[int] | None = None
    """If they were asked for; of several answers, the first has them."""


class Piece(msgspec.Struct, frozen=True):
    """What is new in a stream. The last piece of an answer also brings the whole."""

    text: str
    token_ids: list[int]
    generation: Generation | None = None
    logprobs: list[Row] | None = None
    """Of `token_ids`, if they were asked for."""
    index: int = 0
    """Which of n answers."""
    prompt_token_ids: list[int] | None = None
    """In the first piece of all, if they were asked for."""


class _Answer:
    """One answer in the making."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids = bytearray()
        self.logprobs = PackedRows()
        self.fresh_logprobs: list[Row] = []
        """Of a stream's tokens that come next."""
        self.generation: Generation | None = None


class Call:
    """One request in the making. Not streamed: its parts are only kept, nobody is woken for them."""

    def __init__(
        self, request: Request, streamed: bool, timeout: float | None = None, keeps_logprobs: bool = True
    ) -> None:
        """`timeout`: seconds from now that it may take in all. `keeps_logprobs`: for the whole at the end."""
        self.request = request
        self._timeout = timeout
        self._deadline = None if timeout is None else anyio.current_time() + timeout
        self.num_losses = 0
        """Connections that ended since there was any news."""
        self._waits: tuple[ClientError, float] | None = None
        """For a successor of the engine: what to say if none comes, and when."""
        self.has_begun = False
        """Whether any of an answer has come."""
        self._streamed = streamed
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)
        self._num_left = request.params.n
        self._fresh: list[tuple[Delta | Finished, Sequence[Row] | None]] = []
        self._wants_logprobs = request.params.logprobs is not None
        self._keeps_logprobs = keeps_logprobs and self._wants_logprobs
        self._prompt_logprobs = None if request.params.prompt_logprobs is None else PackedRows()
        self._prompt_ids: list[int] | None = None
        self._untold_prompt: list[int] | None = None
        """The same, for a stream's first piece."""
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: ClientError | None = None

    def rest(self, was_asked: bool) -> Request:
        """After a loss: the same request again, for what has not come yet.

        `was_asked`: whether it can have reached anybody, and be what ended the connection.
        """
        self.num_losses += was_asked
        self._waits = None
        answers = [self._answers[index] for index in range(self.request.params.n)]
        received = tuple(None if one.generation is not None else bytes(one.token_ids) for one in answers)
        handling = msgspec.structs.replace(
            self.request.handling, received_ids=received if len(received) > 1 else received[0] or b""
        )
        return msgspec.structs.replace(self.request, handling=handling)

    def wait_for_successor(self, error: ClientError, until: float) -> None:
        """The engine is shutting down. If nobody takes its place until then, this is how the request ends."""
        self._waits = error, until

    def gave_up_waiting(self, now: float) -> bool:
        """Whether it has failed because no successor came."""
        if self._waits is None or now < self._waits[1]:
            return False
        self.fail(self._waits[0])
        return True

    def add(self, delta: Delta) -> None:
        self.num_losses, self.has_begun = 0, True
        if delta.seed is not None:  # what is still to come, after a loss, is drawn with the same
            params = msgspec.structs.replace(self.request.params, seed=delta.seed)
            self.request = msgspec.structs.replace(self.request, params=params)
        answer = self._answers[delta.index]
        answer.texts.append(delta.text)
        answer.token_ids += delta.token_ids
        if self._streamed:
            self._fresh.append((delta, self._take_logs(answer) if self._wants_logprobs else None))
            self._announce()

    def log(self, logprobs: Logprobs) -> None:
        """Of the tokens that come next."""
        answer = self._answers[logprobs.index]
        if self._keeps_logprobs:
            answer.logprobs.extend(logprobs.tokens)
        if self._streamed:
            answer.fresh_logprobs += logprobs.tokens

    def log_prompt(self, logprobs: PromptLogprobs) -> None:
        """After a loss they may come again."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(logprobs.tokens[len(self._prompt_logprobs) + 1 - logprobs.position :])

    def tell_prompt(self, prompt: PromptIds) -> None:
        """After a loss they come again."""
        if self._prompt_ids is None:
            self._prompt_ids = self._untold_prompt = unpack_ids(prompt.token_ids)

    def _take_logs(self, answer: _Answer) -> Sequence[Row]:
        rows, answer.fresh_logprobs = answer.fresh_logprobs, []
        return PackedRows(rows) if self._has_news else rows  # who has not taken what came before reads slowly

    def end(self, finished: Finished) -> bool:
        """Whether all its answers have ended now."""
        answer = self._answers[finished.index]
        text = "".join(answer.texts) + finished.text
        token_ids = unpack_ids(bytes(answer.token_ids) + finished.token_ids)
        logs = answer.logprobs if self._keeps_logprobs else None
        of_prompt = (None, None) if finished.index else (self._prompt_logprobs, self._prompt_ids)
        end = finished.reason, finished.stop, finished.usage
        answer.generation = Generation(text, token_ids, *end, logs, *of_prompt)
        self._fresh.append((finished, self._take_logs(answer)))
        self._num_left -= 1
        if self._streamed or not self._num_left:
            self._announce()
        return self._num_left == 0

    def fail(self, error: ClientError) -> None:
        self._error = error
        self._announce()

    async def in_time(self, waiting: Coroutine[Any, Any, Result]) -> Result:
        """What is waited for, if it comes before the request's time is over. Raises `RequestTimedOut`."""
        if self._deadline is None:
            return await waiting
        try:
            with anyio.fail_after(max(0.0, self._deadline - anyio.current_time())):
                return await waiting
        except TimeoutError:
            raise RequestTimedOut("timed_out", f"the request had {self._timeout:g} s and was cancelled") from None

    async def whole(self) -> list[Generation]:
        """All its answers, in order."""
        await self.in_time(self._news())
        if self._error is not None:
            raise self._error
        generations = [self._answers[index].generation for index in sorted(self._answers)]
        return [one for one in generations if one is not None]

    async def pieces(self) -> AsyncIterator[Piece]:
        while True:
            if not self._has_news:
                await (self._news() if self._deadline is None else self.in_time(self._news()))
            self._has_news = False
            fresh, self._fresh = self._fresh[:_MOST_AT_ONCE], self._fresh[_MOST_AT_ONCE:]
            is_behind = bool(self._fresh)
            is_over = self._num_left == 0
            if len(fresh) == 1:  # as nearly always
                yield self._piece(fresh[0][0].index, fresh)
            else:
                for index in dict.fromkeys(item.index for item, _ in fresh):
                    yield self._piece(index, [one for one in fresh if one[0].index == index])
            if is_behind:
                self._has_news = True
                await asyncio.sleep(0)
                continue
            if is_over:
                return
            if self._error is not None:
                raise self._error

    def _piece(self, index: int, fresh: list[tuple[Delta | Finished, Sequence[Row] | None]]) -> Piece:
        """All that has come since the last look: who reads slowly gets more at once."""
        prompt_ids, self._untold_prompt = self._untold_prompt, None
        if len(fresh) == 1 and isinstance(fresh[0][0], Delta):
            ((delta, logs),) = fresh
            rows = None if logs is None else list(logs)
            return Piece(delta.text, unpack_ids(delta.token_ids), None, rows, index, prompt_ids)
        text = "".join([item.text for item, _ in fresh])
        token_ids = unpack_ids(b"".join([item.token_ids for item, _ in fresh]))
        rows = [row for _, rows in fresh for row in rows or ()] if self._wants_logprobs else None
        generation = self._answers[index].generation if isinstance(fresh[-1][0], Finished) else None
        return Piece(text, token_ids, generation, rows, index, prompt_ids)

    def _announce(self) -> None:
        """An event for one who waits; asyncio's own is for many, and takes twice the time."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        if self._has_news:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def usage_of_all(generations: Sequence[Generation]) -> Usage:
    """Of all answers to one prompt: that counts once."""
    return msgspec.structs.replace(
        generations[0].usage,
        num_generated_tokens=sum(one.usage.num_generated_tokens for one in generations),
        num_preemptions=sum(one.usage.num_preemptions for one in generations),
        decode_s=max(one.usage.decode_s for one in generations),
    )


def unpack_ids(token_ids: bytes) -> list[int]:
    """Token ids as they come over the wire."""
    return memoryview(token_ids).cast("i").tolist()


def error_of(failed: Failed) -> ClientError:
    match failed.code:
        case "overloaded" | "draining" | "slow_client":
            return Overloaded(failed.code, failed.message, failed.retry_after)
        case "engine_died":
            return EngineDied(failed.code, failed.message)
        case "timed_out":
            return RequestTimedOut(failed.code, failed.message)
        case code:
            return RequestRefused(code, failed.message)
