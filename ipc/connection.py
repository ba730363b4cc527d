"""One connection to an engine's front door, from connecting to its end.

It moves bytes and notices what becomes of the connection; it knows no message. A client whose connection has ended
makes a new one, so that nothing queued for a tokenizer that died reaches its successor.
"""

import contextlib
import weakref
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tercet.ipc.addresses import is_ipv6
from tercet.ipc.keys import unlock
from tercet.ipc.readiness import Readiness

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_LINGER_MS = 500
"""Cancels still have to leave."""


class Connection:
    """Made inside a running event loop. Connecting goes on by itself until somebody listens."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str | None = None) -> None:
        """Raises `ValueError` for an address that is none."""
        self._socket = context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # bounded by what this program itself asks for
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.IPV6, is_ipv6(address))
        if key is not None:
            unlock(self._socket, key)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        # Left open, it would have the program wait for ever when it is garbage: ZeroMQ's context waits for its sockets.
        self._end = weakref.finalize(self, _close, self._socket, self._monitor)
        self._end.atexit = False
        self._readiness, self._events = Readiness(self._socket), Readiness(self._monitor)
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise ValueError(f"got address {address!r}; want ipc://PATH or tcp://HOST:PORT") from None

    def send(self, message: bytes) -> None:
        """Never waits: what is sent before somebody listens leaves then.

        ZeroMQ gives up for good on who will not have us; what is sent there is lost with the connection.
        """
        with contextlib.suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)
        self._readiness.refresh()

    async def receive(self) -> list[bytes]:
        """All messages that are there; waits for the first."""
        return [frames[-1] for frames in await self._readiness.receive()]

    async def deliver(self, take: Callable[[list[bytes]], None]) -> None:
        """Call `take` with all messages that are there, whenever some have come; until it raises."""
        await self._readiness.deliver(lambda messages: take([frames[-1] for frames in messages]))

    def receive_rest(self) -> list[bytes]:
        """All messages that are there; never waits."""
        messages = []
        try:
            while True:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            return messages

    async def is_up(self) -> bool:
        """Wait for the next change: True when somebody answers, False when the connection has ended."""
        while True:
            for frames in await self._events.receive():
                event = parse_monitor_message(frames)["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    return False
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return True

    def close(self, *, lingers: bool = True) -> None:
        self._readiness.stop()
        self._events.stop()
        if not lingers:
            self._socket.setsockopt(zmq.LINGER, 0)
        self._end()


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close()
