"""What a client gets back: a `Generation` or several, piece by piece or whole.

A `Call` collects the answers to one request. It knows no socket.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

import msgspec

from tercet.ipc.answers import Delta, Finished, FinishReason, Logprobs, News, PromptIds, PromptLogprobs, Usage
from tercet.ipc.messages import Request
from tercet.ipc.pending import Pending
from tercet.ipc.rows import PackedRows, Row

_MOST_AT_ONCE = 64
"""Parts of an answer that are handed out before other tasks have a turn."""


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


class Call(Pending[list[Generation]]):
    """One request in the making. Not streamed: its parts are only kept, nobody is woken for them."""

    def __init__(
        self, request: Request, streamed: bool, timeout: float | None = None, keeps_logprobs: bool = True
    ) -> None:
        """`keeps_logprobs`: for the whole at the end."""
        super().__init__(request, timeout)
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

    def _rest(self) -> Request:
        answers = [self._answers[index] for index in range(self.request.params.n)]
        received = tuple(None if one.generation is not None else bytes(one.token_ids) for one in answers)
        handling = msgspec.structs.replace(
            self.request.handling, received_ids=received if len(received) > 1 else received[0] or b""
        )
        return msgspec.structs.replace(self.request, handling=handling)

    def take(self, item: News) -> bool:
        match item:
            case Delta():  # as nearly always
                self.add(item)
            case Finished():
                return self.end(item)
            case Logprobs():
                self.log(item)
            case PromptLogprobs():
                self.log_prompt(item)
            case PromptIds():
                self.tell_prompt(item)
        return False

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
