"""Typed ZeroMQ sockets: every process has one inbox, and one outbox per receiver.

What arrives is decoded with the receiver's union, so a message of an unknown shape is an error and nothing else. This
module knows sockets and encodings; it knows no message.
"""

import math
import socket as os_socket
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

from tercet.ipc.addresses import check_ipc_path, is_ipv6
from tercet.ipc.readiness import Readiness

Message = TypeVar("Message")

_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)  # as enums they cost a microsecond each
MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest message that a client may send; ZeroMQ closes the connection of one that sends more."""
MAX_PLAIN_BYTES = 16 * 2**20
"""Of such a message, its images apart, which stay the bytes they are. All else takes many times as much once it is
read."""
_INTERNAL_HWM = 10_000
"""Messages queued between two processes of an engine before the sender has to wait."""
_OUTBOX_LINGER_MS = 1000
_RETRY_MS = 10
"""Between attempts to reach a receiver that has not bound its address yet."""


class AddressInUse(OSError):
    """Somebody else already listens there; the message names the address."""


class Inbox(Generic[Message]):
    """Where a synchronous process receives. Not thread-safe."""

    def __init__(self, address: str, union: object) -> None:
        self._socket = _bind_pull(address)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; waits up to `timeout` seconds (None: for ever), None if there was none.

        Milliseconds are whole: a timeout that is rounded down would have its caller turn in circles for the rest.
        """
        if not int(self._socket.getsockopt(_EVENTS)) & _POLLIN and (
            timeout == 0 or not self._socket.poll(None if timeout is None else math.ceil(timeout * 1000))
        ):
            return None
        return self._decoder.decode(self._socket.recv(_NOBLOCK))

    def close(self) -> None:
        self._socket.close(linger=0)


class Outbox:
    """The way to one receiver, which may come later than we do. Not thread-safe."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _INTERNAL_HWM)
        self._socket.setsockopt(zmq.LINGER, _OUTBOX_LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Send; waits only while the receiver is very far behind."""
        self._socket.send(self._encoder.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Send what is encoded already: the same bytes for several receivers."""
        self._socket.send(message)

    def try_send(self, message: msgspec.Struct) -> bool:
        """Send without ever waiting; False if the receiver is too far behind."""
        try:
            self._socket.send(self._encoder.encode(message), _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """What was sent still has a second to leave."""
        self._socket.close()

    def abandon(self) -> None:
        """Close; what the receiver has not got by now it shall not get."""
        self._socket.close(linger=0)


class AsyncInbox(Generic[Message]):
    """Where an asynchronous process receives."""

    def __init__(self, address: str, union: object, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._socket = _bind_pull(address, context)
        self._readiness = Readiness(self._socket)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)

    async def deliver(self, take: Callable[[list[Message]], None]) -> None:
        """Call `take` with everything that is there, in order, whenever something has come; until it raises."""
        decode = self._decoder.decode
        await self._readiness.deliver(lambda messages: take([decode(frame) for (frame,) in messages]))

    def close(self) -> None:
        self._readiness.stop()
        self._socket.close(linger=0)


def bind(socket: zmq.Socket[bytes], address: str) -> None:
    """Bind, but never take an address from a living process: ZeroMQ itself silently replaces ipc files."""
    if address.startswith("ipc://"):
        clear_stale_file(address)
    socket.setsockopt(zmq.IPV6, is_ipv6(address))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(f"cannot listen on {address}: another process does") from None
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from None


def _bind_pull(address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> zmq.Socket[bytes]:
    socket = (context or zmq.Context.instance()).socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, _INTERNAL_HWM)
    try:
        bind(socket, address)
    except OSError:
        socket.close(linger=0)
        raise
    return socket


def clear_stale_file(address: str) -> None:
    """Remove the file of an ipc:// address if nobody is behind it; else say why it cannot be had."""
    path = check_ipc_path(address)
    if not path.parent.is_dir():
        raise OSError(f"cannot listen on {address}: there is no folder {path.parent}")
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise AddressInUse(f"cannot listen on {address}: {path} exists and is not a socket")
    with os_socket.socket(os_socket.AF_UNIX, os_socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:  # nobody behind it: left by a process that was killed
            path.unlink()
            return
        except OSError as error:
            raise AddressInUse(f"cannot listen on {address}: {error.strerror}") from None
    raise AddressInUse(f"cannot listen on {address}: another process does")
