"""What a client gets back: a `Generation`, piece by piece or whole, or one of a few errors.

A `Call` collects the answer to one request. It knows no socket.
"""

import asyncio
from collections.abc import AsyncIterator

import anyio
import msgspec

from tercet.ipc.messages import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Request,
    TokenLogprob,
    Usage,
)


class ClientError(Exception):
    """What a client may have to deal with. `code` is the engine's word for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestRefused(ClientError):
    """The request cannot be served as it is; the message says what to change."""


class Overloaded(ClientError):
    """The engine takes no more now; ask again later, or elsewhere."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(code, message)
        self.retry_after = retry_after
        """Seconds after which it is worth asking again, where the engine knows."""


class EngineDied(ClientError):
    """The engine is gone, or was never there; what it had not sent is lost."""


class RequestTimedOut(ClientError, TimeoutError):
    """The request waited or took longer than the caller allowed, and was cancelled."""


class Generation(msgspec.Struct, frozen=True):
    """A finished request."""

    text: str
    token_ids: list[int]
    reason: FinishReason
    stop: str | int | None
    """The stop string or token id that ended it, if one did."""
    usage: Usage
    logprobs: list[tuple[TokenLogprob, ...]] | None = None
    """Of each token: itself, then the likeliest in its place, if they were asked for."""
    prompt_logprobs: list[tuple[TokenLogprob, ...]] | None = None
    """The same of the prompt's tokens from the second on."""


class Piece(msgspec.Struct, frozen=True):
    """What is new in a stream. The last piece also brings the whole."""

    text: str
    token_ids: list[int]
    generation: Generation | None = None
    logprobs: list[tuple[TokenLogprob, ...]] | None = None
    """Of `token_ids`, if they were asked for."""


class Call:
    """One request in the making. Not streamed: its parts are only kept, nobody is woken for them."""

    def __init__(self, request: Request, streamed: bool) -> None:
        self.request = request
        self.num_losses = 0
        """Connections that ended since there was any news."""
        self._waits: tuple[ClientError, float] | None = None
        """For a successor of the engine: what to say if none comes, and when."""
        self._streamed = streamed
        self._texts: list[str] = []
        self._token_ids = bytearray()
        self._fresh: list[tuple[Delta | Finished, list[tuple[TokenLogprob, ...]] | None]] = []
        self._logprobs: list[tuple[TokenLogprob, ...]] | None = None if request.params.logprobs is None else []
        self._prompt_logprobs: list[tuple[TokenLogprob, ...]] | None = (
            None if request.params.prompt_logprobs is None else []
        )
        self._wake = asyncio.Event()
        self._generation: Generation | None = None
        self._error: ClientError | None = None

    def rest(self) -> Request:
        """After a loss: the same request again, for what has not come yet."""
        self.num_losses += 1
        self._waits = None
        handling = msgspec.structs.replace(self.request.handling, received_ids=bytes(self._token_ids))
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
        self.num_losses = 0
        if delta.seed is not None:  # what is still to come, after a loss, is drawn with the same
            params = msgspec.structs.replace(self.request.params, seed=delta.seed)
            self.request = msgspec.structs.replace(self.request, params=params)
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if self._streamed:
            self._fresh.append((delta, self._logs_of(delta)))
            self._wake.set()

    def log(self, logprobs: Logprobs) -> None:
        """Of the tokens that come next."""
        if self._logprobs is not None:
            self._logprobs += logprobs.tokens

    def log_prompt(self, logprobs: PromptLogprobs) -> None:
        """After a loss they may come again."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += logprobs.tokens[len(self._prompt_logprobs) + 1 - logprobs.position :]

    def _logs_of(self, item: Delta | Finished) -> list[tuple[TokenLogprob, ...]] | None:
        num_tokens = len(item.token_ids) // 4
        return None if self._logprobs is None else self._logprobs[len(self._logprobs) - num_tokens :]

    def end(self, finished: Finished) -> None:
        text = "".join(self._texts) + finished.text
        token_ids = unpack_ids(bytes(self._token_ids) + finished.token_ids)
        logs = self._logprobs, self._prompt_logprobs
        self._generation = Generation(text, token_ids, finished.reason, finished.stop, finished.usage, *logs)
        self._fresh.append((finished, self._logs_of(finished)))
        self._wake.set()

    def fail(self, error: ClientError) -> None:
        self._error = error
        self._wake.set()

    async def whole(self, timeout: float | None) -> Generation:
        await self._wait(timeout, None if timeout is None else anyio.current_time() + timeout)
        if self._error is not None:
            raise self._error
        assert self._generation is not None
        return self._generation

    async def pieces(self, timeout: float | None) -> AsyncIterator[Piece]:
        deadline = None if timeout is None else anyio.current_time() + timeout
        while True:
            await self._wait(timeout, deadline)
            self._wake.clear()
            fresh, self._fresh = self._fresh, []
            if fresh:
                yield (piece := self._piece(fresh))
                if piece.generation is not None:
                    return
            if self._error is not None:
                raise self._error

    def _piece(self, fresh: list[tuple[Delta | Finished, list[tuple[TokenLogprob, ...]] | None]]) -> Piece:
        """All that has come since the last look: who reads slowly gets more at once."""
        text = "".join([item.text for item, _ in fresh])
        token_ids = unpack_ids(b"".join([item.token_ids for item, _ in fresh]))
        logs = None if self._logprobs is None else [row for _, rows in fresh for row in rows or ()]
        return Piece(text, token_ids, self._generation if isinstance(fresh[-1][0], Finished) else None, logs)

    async def _wait(self, timeout: float | None, deadline: float | None) -> None:
        if deadline is None:
            await self._wake.wait()
            return
        try:
            with anyio.fail_after(max(0.0, deadline - anyio.current_time())):
                await self._wake.wait()
        except TimeoutError:
            raise RequestTimedOut("timed_out", f"the request had {timeout:g} s and was cancelled") from None


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
