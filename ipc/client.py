"""The async client: continue texts, token ids or conversations, many at once, streamed or whole.

One connection carries all requests of a client. Leaving a stream, or cancelling the task that waits, cancels the
request in the engine. Nothing here waits for ever on an engine that is gone.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Self, cast

import anyio
import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from tercet.ipc.call import (
    Call,
    ClientError,
    EngineDied,
    Generation,
    Overloaded,
    Piece,
    RequestRefused,
    RequestTimedOut,
    error_of,
)
from tercet.ipc.messages import (
    Batch,
    Cancel,
    Chat,
    ChatMessage,
    Delta,
    EngineInfo,
    Failed,
    Finished,
    FromClient,
    Generate,
    GenerateIds,
    Hello,
    Rejected,
    Request,
    SamplingParams,
    ToClient,
)
from tercet.ipc.sockets import MAX_MESSAGE_BYTES, Readiness

__all__ = [
    "Client",
    "ClientError",
    "EngineDied",
    "Generation",
    "Overloaded",
    "Piece",
    "Prompt",
    "RequestRefused",
    "RequestTimedOut",
]

Prompt = str | Sequence[int] | Sequence[ChatMessage]

_PING_S = 5.0
_SILENCE_S = 20.0
"""An engine that owes answers and says nothing for so long, not even to pings, is taken for dead."""
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Client:
    """A connection to one engine; use it as an async context manager, in one event loop."""

    def __init__(self, address: str, *, connect_timeout: float = 10.0) -> None:
        """`address`: as the engine's `--listen`. Entering waits at most `connect_timeout` seconds for an answer."""
        self._address = address
        self._connect_timeout = connect_timeout
        self._calls: dict[str, Call] = {}
        self._next_call = 0
        self._info: asyncio.Future[EngineInfo] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._last_heard = 0.0

    async def __aenter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # bounded by what this program itself asks for
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._connected = asyncio.Event()
        self._readiness, self._events = Readiness(self._socket), Readiness(self._monitor)
        self._tasks = [asyncio.ensure_future(work) for work in (self._receive(), self._watch(), self._ping())]
        try:
            self._socket.connect(self._address)
            await self.info()
        except BaseException as error:
            await self._close()
            if isinstance(error, zmq.ZMQError):
                raise ValueError(f"got address {self._address!r}; want ipc://PATH or tcp://HOST:PORT") from None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for request_id in list(self._calls):
            self._send(Cancel(request_id))
        self._lose("closed", "the client was closed")
        await self._close()

    async def info(self) -> EngineInfo:
        """What the engine is and how busy."""
        if self._info is None:
            self._info = asyncio.get_running_loop().create_future()
            self._send(Hello())
        try:
            with anyio.fail_after(self._connect_timeout):
                return await asyncio.shield(self._info)
        except TimeoutError:
            self._info = None
            raise EngineDied(
                "no_answer", f"nothing answers at {self._address} within {self._connect_timeout:g} s; is it serving?"
            ) from None

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[Piece]:
        """The answer, piece by piece. Leaving the loop cancels the request."""
        call = await self._start(prompt, params, cache_salt, streamed=True)
        try:
            async for piece in call.pieces(timeout):
                yield piece
        finally:
            self._finish(call)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> Generation:
        """The whole answer. Cancelling the task cancels the request."""
        call = await self._start(prompt, params, cache_salt, streamed=False)
        try:
            return await call.whole(timeout)
        finally:
            self._finish(call)

    async def _start(self, prompt: Prompt, params: SamplingParams | None, cache_salt: str, streamed: bool) -> Call:
        if not self._connected.is_set():
            try:
                with anyio.fail_after(self._connect_timeout):
                    await self._connected.wait()
            except TimeoutError:
                raise EngineDied("no_answer", f"nothing listens at {self._address}") from None
        self._next_call += 1
        request = _request(str(self._next_call), prompt, params or SamplingParams(), cache_salt)
        encoded = self._encoder.encode(request)
        if len(encoded) > MAX_MESSAGE_BYTES:
            raise RequestRefused(
                "prompt_too_long", f"the request has {len(encoded)} bytes; want at most {MAX_MESSAGE_BYTES}"
            )
        if not self._calls:
            self._last_heard = asyncio.get_running_loop().time()
        call = self._calls[request.request_id] = Call(request.request_id, streamed)
        self._send_encoded(encoded)
        return call

    def _finish(self, call: Call) -> None:
        if self._calls.pop(call.request_id, None) is not None:
            self._send(Cancel(call.request_id))

    def _send(self, message: FromClient) -> None:
        self._send_encoded(self._encoder.encode(message))

    def _send_encoded(self, message: bytes) -> None:
        self._socket.send(message, zmq.NOBLOCK)
        self._readiness.refresh()

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for frames in await self._readiness.receive():
                self._take(self._decoder.decode(frames[-1]))
            self._last_heard = loop.time()

    def _take(self, message: ToClient) -> None:
        match message:
            case Batch(items=items):
                for item in items:
                    self._take_item(item)
            case Failed():
                self._take_item(message)
            case Rejected(request_id=request_id, code=code, message=text):
                call = self._calls.pop(request_id or "", None)
                if call is not None:
                    call.fail(RequestRefused(code, text))
            case EngineInfo():
                if self._info is not None and not self._info.done():
                    self._info.set_result(message)
                self._info = None

    def _take_item(self, item: Delta | Finished | Failed) -> None:
        call = self._calls.get(item.request_id)
        if isinstance(item, Delta):
            if call is None:
                self._send(Cancel(item.request_id))  # nobody waits for it: a request sent to an engine lost since
            else:
                call.add(item)
        elif call is not None:
            del self._calls[item.request_id]
            if isinstance(item, Finished):
                call.end(item)
            else:
                call.fail(error_of(item.code, item.message))

    async def _watch(self) -> None:
        while True:
            for frames in await self._events.receive():
                if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                    self._connected.clear()
                    self._lose("engine_died", f"the engine at {self._address} has closed the connection")
                else:
                    self._connected.set()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_PING_S)
            silence = loop.time() - self._last_heard
            if self._calls and silence > _SILENCE_S:
                self._lose("engine_died", f"the engine at {self._address} has said nothing for {silence:.0f} s")
            elif self._calls and silence > _PING_S:
                self._send(Hello())

    def _lose(self, code: str, message: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(EngineDied(code, message))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._readiness.stop()
        self._events.stop()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)  # the cancels still have to leave
        await anyio.to_thread.run_sync(self._context.term)


def _request(request_id: str, prompt: Prompt, params: SamplingParams, cache_salt: str) -> Request:
    if isinstance(prompt, str):
        return Generate(request_id, prompt, params, cache_salt)
    if prompt and isinstance(prompt[0], ChatMessage):
        return Chat(request_id, tuple(cast("Sequence[ChatMessage]", prompt)), params, cache_salt)
    try:
        return GenerateIds(request_id, array("i", cast("Sequence[int]", prompt)).tobytes(), params, cache_salt)
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"got a prompt of {type(prompt).__name__} ({error}); want a str, int32 token ids, or ChatMessages"
        ) from None
