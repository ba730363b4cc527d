"""The HTTP server around the application: its socket, its beginning and its end.

uvicorn moves the bytes. It knows no route.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from tercet.engine.child import SupervisorLink
from tercet.engine.errors import AddressTaken, StartupFailed
from tercet.engine.http_address import parse_http_address
from tercet.engine.http_app import make_app
from tercet.engine.http_connection import Connection
from tercet.engine.http_door import Door
from tercet.ipc.client import Client
from tercet.ipc.process_messages import Abandon, Drain, HandOver, Impaired, Serving, Standing, ToChild

_IDLE_SECONDS = 75
_BACKLOG = 4096
_FIRST_EVENT_TURNS = 3
"""Of the event loop, from an answer's first piece to its first event: one, as the task that waits for it sends it; of a
request with several prompts two more."""
_FAREWELL_SECONDS = 1
"""What is being sent when the engine ends has so long to leave, unless the supervisor gives it more."""


def bind(address: str) -> socket.socket:
    """Take the address, or say who has it."""
    host, port = parse_http_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Its protocol by name: asyncio sends at once (TCP_NODELAY) on no others, and each event would wait for the one
        # before to be acknowledged, which the other side puts off by 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise _not_ours(address, error) from None
    return listener


def _listen(address: str, listener: socket.socket) -> None:
    """Two engines may bind an address as long as neither listens there: the first that does has it."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _not_ours(address, error) from None


def _not_ours(address: str, error: OSError) -> StartupFailed:
    kind = AddressTaken if error.errno == errno.EADDRINUSE else StartupFailed
    return kind(f"--http {address}: {error.strerror or error}")


async def serve(link: SupervisorLink, listener: socket.socket) -> None:
    """Until the supervisor says that the engine ends."""
    spec = link.spec
    config = spec.config
    async with Client(
        spec.addresses.listen[0],
        key=config.listen_key,
        connect_timeout=config.startup_timeout,
        head_start=_FIRST_EVENT_TURNS,
    ) as client:
        door = Door(client, await client.info(), config)
        server = _Server(_uvicorn_config(make_app(door)))
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        loop = asyncio.get_running_loop()

        def settle() -> None:
            """Once nothing has come for a while: of what is still open only answers that have begun are waited for."""
            silence = loop.time() - client.last_heard
            if silence < _FAREWELL_SECONDS:
                loop.call_later(_FAREWELL_SECONDS - silence, settle)
            else:
                door.turn_away()
                server.close_idle()

        def obey(command: ToChild) -> None:
            match command:
                case Drain():
                    door.condition.draining = True
                case Impaired(roles=roles):
                    door.condition.impaired = roles
                case Standing():
                    door.stand(command)
                case HandOver(seconds=seconds):
                    door.condition.draining = True
                    server.hand_over(max(seconds, _FAREWELL_SECONDS))
                    loop.call_later(_FAREWELL_SECONDS, settle)
                case Abandon():
                    door.condition.draining = True
                    server.should_exit = True
                case _:
                    raise AssertionError(f"{command!r} is not for the HTTP door")

        link.subscribe(lambda command: _soon(loop, obey, command))  # nobody is answered before what was said so far
        assert config.http is not None
        _listen(config.http, listener)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        beating = asyncio.ensure_future(_beat(link))
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(0.01)
            link.tell(Serving())
            await serving
        finally:
            beating.cancel()


def _soon(loop: asyncio.AbstractEventLoop, obey: Any, command: ToChild) -> None:
    """Called in the link's thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, so there is nobody to obey
        loop.call_soon_threadsafe(obey, command)


async def _beat(link: SupervisorLink) -> None:
    count = 0
    while True:
        link.beat(count)
        count += 1
        await asyncio.sleep(link.beat_seconds)


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_FAREWELL_SECONDS,
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Who does not take its answer is cut off at the end: how many there are is said, where each was sent to is not."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _Server(uvicorn.Server):
    def hand_over(self, seconds: float) -> None:
        """Listen no more, close what is idle, and exit when all answers have been taken, or after so many seconds."""
        self.config.timeout_graceful_shutdown = seconds  # type: ignore[assignment] # asyncio counts parts of a second
        self.should_exit = True

    def close_idle(self) -> None:
        """Those who had just come when the others were closed; who is being answered goes behind that."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: the supervisor says when it is over."""
        yield
