"""The async client: continue texts, token ids or conversations, many at once, streamed or whole; or embed them.

One connection carries all requests of a client. Leaving a stream, or cancelling the task that waits, cancels the
request in the engine. When the connection ends, the client makes a new one and asks for the rest of every answer: a
tokenizer that was killed is a pause. Nothing here waits for ever on an engine that is gone.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import msgspec

from tercet.ipc.answers import Batch, Detokenized, EngineInfo, Failed, Rejected, Tokenized
from tercet.ipc.call import Call, Generation, Piece
from tercet.ipc.calls import Calls
from tercet.ipc.dialect import Dialect, ForeignEngine
from tercet.ipc.embed_call import EmbedCall, Embedding
from tercet.ipc.errors import ClientError, EngineDied, Overloaded, RequestRefused, RequestTimedOut
from tercet.ipc.head_start import HeadStart
from tercet.ipc.lifeline import Lifeline, to_its_end
from tercet.ipc.messages import ChatMessage, ChatOptions, EmbeddingParams, FromClient, Handling, Hello, SamplingParams
from tercet.ipc.pending import Pending, Whole
from tercet.ipc.prompt import Prompt, encode, make_embed, make_request, pack_ids
from tercet.ipc.questions import Questions

__all__ = [
    "Client",
    "ClientError",
    "Embedding",
    "EngineDied",
    "Generation",
    "Overloaded",
    "Piece",
    "Prompt",
    "RequestRefused",
    "RequestTimedOut",
]

_PING_S = 5.0
_SILENCE_S = 20.0
"""An engine that owes answers and says nothing to one who listens for so long, not even to pings, is taken for dead."""


class Client:
    """A connection to one engine; use it as an async context manager, in one event loop."""

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        connect_timeout: float = 10.0,
        reconnect_timeout: float = 60.0,
        successor_timeout: float = 0.0,
        head_start: int = 0,
    ) -> None:
        """`address` and `key`: as the engine's `--listen` and `--listen-key`.

        Entering waits at most `connect_timeout` seconds for an answer. When the connection ends, requests wait at most
        `reconnect_timeout` seconds for the engine to come back. When it is shutting down, they fail as `Overloaded`; or
        wait `successor_timeout` seconds for another engine to take its address, and go on there.
        `head_start`: turns of the event loop by which readers of first tokens go ahead of others, for a program that
        hands pieces on through so many tasks.
        """
        self._address = address
        self._key = key
        self._reconnect_timeout = max(reconnect_timeout, successor_timeout)
        self._successor_timeout = successor_timeout
        self._connect_timeout = connect_timeout
        self._calls = Calls(self._send, successor_timeout)
        self._in_turn = HeadStart(self._calls.take, self._calls.split, head_start)
        self._next_call = 0
        self._questions = Questions(self._send)
        self._dialect = Dialect()
        self._gone: str | None = "this client is not open; want `async with Client(…) as client`"
        """Why there is nobody to ask, or nobody any more."""
        self._is_entered = False

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("this client is open already; want one `async with` around all that use it")
        self._line = Lifeline(self._address, self._key, self._take, self._renew)
        self._gone, self._is_entered = None, True
        self._pinging = asyncio.ensure_future(self._ping())
        try:
            await self.info()
        except BaseException:
            await to_its_end(self._close())
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._calls.cancel_all()
        self.give_up("the client was closed")
        await to_its_end(self._close())

    @property
    def last_heard(self) -> float:
        """When the last message came, in the event loop's time; that of the news for who has just been told some."""
        return self._line.last_heard

    @property
    def num_tokens(self) -> int:
        """Of all answers, as far as they have come; those that nobody waited for to their end as well."""
        return self._calls.num_tokens

    async def info(self) -> EngineInfo:
        """What the engine is and how busy."""
        self._check_there()
        info = await self._questions.info(self._connect_timeout)
        if info is None:
            within = f"within {self._connect_timeout:g} s"
            raise EngineDied("no_answer", f"nothing answers at {self._address} {within}; {self._line.advice}")
        return info

    async def tokenize(self, prompt: str | Sequence[ChatMessage], *, options: ChatOptions | None = None) -> list[int]:
        """The token ids that a request with this prompt would begin with."""
        return await self._questions.tokenize(self._new_name(), make_request(prompt, options=options))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return await self._questions.detokenize(self._new_name(), pack_ids(token_ids))

    def give_up(self, reason: str) -> None:
        """The engine is known to have ended for good: fail what waits for it, and do not wait for its return."""
        self._gone = reason
        self._line.stop_waiting()
        self._lose("engine_died", reason)
        self._questions.end(EngineDied("engine_died", reason))

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: ChatOptions | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        return_prompt_ids: bool = False,
        keep_logprobs: bool = True,
    ) -> AsyncIterator[Piece]:
        """The answer, piece by piece; of n answers, each piece is of one (`index`). Leaving the loop cancels them all.

        `options`: tools and more, for a conversation's chat template. Requests of lower `priority` go first.
        `queue_timeout`: seconds that it may wait before it is begun; `timeout`: that it may take in all. With
        `return_prompt_ids` the first piece has the prompt's. Without `keep_logprobs` the whole in the last has none.
        """
        handling = Handling(priority=priority, queue_timeout=queue_timeout, return_prompt_ids=return_prompt_ids)
        request = make_request(prompt, params, cache_salt, handling, options)
        call = Call(request, True, timeout, keep_logprobs)
        await self._start(call)
        try:
            async for piece in call.pieces():
                yield piece
        finally:
            self._calls.close(call)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: ChatOptions | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        return_prompt_ids: bool = False,
    ) -> Generation:
        """The whole answer; arguments as of `stream`. Cancelling the task cancels the request."""
        handling = Handling(priority=priority, queue_timeout=queue_timeout, return_prompt_ids=return_prompt_ids)
        request = make_request(prompt, params, cache_salt, handling, options)
        if (n := request.params.n) > 1:
            raise ValueError(f"n is {n}, and generate gives one answer; want generate_several, or stream")
        return (await self._whole(Call(request, False, timeout)))[0]

    async def generate_several(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        options: ChatOptions | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        return_prompt_ids: bool = False,
    ) -> list[Generation]:
        """`params.n` answers to one prompt, which is computed once; answer i is what `seed` + i would say alone."""
        handling = Handling(priority=priority, queue_timeout=queue_timeout, return_prompt_ids=return_prompt_ids)
        request = make_request(prompt, params, cache_salt, handling, options)
        return await self._whole(Call(request, False, timeout))

    async def embed(
        self,
        prompt: str | Sequence[int],
        params: EmbeddingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> Embedding:
        """What the model makes of a text or of token ids: its last hidden state. Cancelling the task cancels it."""
        handling = Handling(priority=priority, queue_timeout=queue_timeout)
        return await self._whole(EmbedCall(make_embed(prompt, params, cache_salt, handling), timeout))

    async def _whole(self, call: Pending[Whole]) -> Whole:
        await self._start(call)
        try:
            return await call.whole()
        finally:
            self._calls.close(call)

    async def _start(self, call: Pending[Any]) -> None:
        call.request = msgspec.structs.replace(call.request, request_id=self._new_name())
        is_up = await call.in_time(self._line.is_up(within=max(self._connect_timeout, self._reconnect_timeout)))
        self._check_there()
        if not is_up:
            raise EngineDied("no_answer", f"nothing listens at {self._address}; {self._line.advice}")
        encoded = encode(call.request)
        if not self._calls:
            self._line.last_heard = asyncio.get_running_loop().time()
        self._calls.open(call)
        self._line.send(encoded)

    def _new_name(self) -> str:
        """For what is about to be asked. Raises `EngineDied` where nobody is there to be asked."""
        self._check_there()
        self._next_call += 1
        return str(self._next_call)

    def _check_there(self) -> None:
        if self._gone is not None:
            raise EngineDied("engine_died", self._gone)
        self._line.check_loop()

    def _send(self, message: FromClient) -> None:
        self._line.send(encode(message))

    def _renew(self, was_up: bool) -> None:
        """On a new connection."""
        self._in_turn.flush()
        if not self._reconnect_timeout:
            self._lose("engine_died", f"the engine at {self._address} has closed the connection")
        self._questions.ask_again()
        self._calls.ask_again(was_up)

    def _take(self, encoded: bytes) -> None:
        try:
            message = self._dialect.read(encoded)
        except ForeignEngine as error:
            self.give_up(f"the engine at {self._address} {error}")
            return
        if isinstance(message, Batch):
            self._in_turn.deliver(message.items)
            return
        self._in_turn.flush()
        match message:
            case Failed():
                if not self._questions.fail(message):
                    self._calls.take(message)
            case Tokenized() | Detokenized():
                self._questions.take(message)
            case Rejected(request_id=name, code=code):
                if not self._questions.fail(Failed(name or "", code, message.message)):
                    self._calls.reject(message)
            case EngineInfo():
                self._questions.inform(message)

    async def _ping(self) -> None:
        interval = min(_PING_S, (self._successor_timeout or self._reconnect_timeout) / 5 or _PING_S)
        while True:
            if not await self._line.listen(interval):
                continue
            now, silence = asyncio.get_running_loop().time(), self._line.silence
            self._calls.give_up_waiting(now)
            if (lost_at := self._line.lost_at) is not None:
                if now - lost_at > self._reconnect_timeout:
                    gone = f"the engine at {self._address} is gone for {now - lost_at:.0f} s"
                    self._lose("engine_died", f"{gone}; {self._line.advice}")
            elif self._calls and silence >= _SILENCE_S:
                self._lose("engine_died", f"the engine at {self._address} has said nothing for {silence:.0f} s")
            elif self._calls and silence >= _PING_S:
                self._send(Hello())

    def _lose(self, code: str, message: str) -> None:
        self._in_turn.flush()
        self._calls.lose(EngineDied(code, message))
        self._questions.lose(EngineDied(code, message))

    async def _close(self) -> None:
        self._pinging.cancel()
        await asyncio.gather(self._pinging, return_exceptions=True)
        await self._line.close()
        self._is_entered = False
