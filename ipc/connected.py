"""A client's connection to one engine, from its beginning to its end, and the requests that it carries.

What may be asked for is its subclass's matter (`client.py`). Nothing here waits for ever on an engine that is gone.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from tercet.ipc.answers import Batch, Detokenized, EngineInfo, Failed, Rejected, Tokenized
from tercet.ipc.calls import Calls
from tercet.ipc.change_messages import Change, Changed
from tercet.ipc.dialect import Dialect, ForeignEngine
from tercet.ipc.errors import EngineDied
from tercet.ipc.head_start import HeadStart
from tercet.ipc.lifeline import Lifeline, to_its_end
from tercet.ipc.messages import ChatMessage, ChatOptions, FromClient, Hello
from tercet.ipc.pending import Pending, Whole
from tercet.ipc.picture_files import with_files
from tercet.ipc.prompt import PicturePrompt, encode, make_request, pack_ids
from tercet.ipc.questions import Questions

_PING_S = 5.0
_SILENCE_S = 20.0
"""An engine that owes answers and says nothing to one who listens for so long, not even to pings, is taken for dead."""


class Connected:
    """What a client is before it asks for anything that the model makes."""

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

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage] | PicturePrompt, *, options: ChatOptions | None = None
    ) -> list[int]:
        """The token ids that a request with this prompt would begin with."""
        request = make_request(await with_files(prompt), options=options)
        return await self._questions.tokenize(self._new_name(), request)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return await self._questions.detokenize(self._new_name(), pack_ids(token_ids))

    def give_up(self, reason: str) -> None:
        """The engine is known to have ended for good: fail what waits for it, and do not wait for its return."""
        self._gone = reason
        self._line.stop_waiting()
        self._lose("engine_died", reason)
        self._questions.end(EngineDied("engine_died", reason))

    async def _change(self, change: Change) -> None:
        """`change` has no name yet."""
        if not self._is_owed:
            self._line.last_heard = asyncio.get_running_loop().time()
        await self._questions.change(msgspec.structs.replace(change, request_id=self._new_name()))

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
            case Tokenized() | Detokenized() | Changed():
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
            elif self._is_owed and silence >= _SILENCE_S:
                self._lose("engine_died", f"the engine at {self._address} has said nothing for {silence:.0f} s")
            elif self._is_owed and silence >= _PING_S:
                self._send(Hello())

    @property
    def _is_owed(self) -> bool:
        """An answer, which may take its time."""
        return bool(self._calls or self._questions)

    def _lose(self, code: str, message: str) -> None:
        self._in_turn.flush()
        self._calls.lose(EngineDied(code, message))
        self._questions.lose(EngineDied(code, message))

    async def _close(self) -> None:
        self._pinging.cancel()
        await asyncio.gather(self._pinging, return_exceptions=True)
        await self._line.close()
        self._is_entered = False
