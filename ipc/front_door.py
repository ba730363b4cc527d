"""Where clients come in: one ZeroMQ ROUTER on every address they may use.

It delivers and receives bytes, and notices who left. What the bytes mean is decided behind it. A client is known by the
routing id of its connection: a new connection is a new client.
"""

from collections.abc import Callable, Iterable
from enum import Enum

import zmq

from tercet.ipc.keys import guard
from tercet.ipc.readiness import Messages, Readiness
from tercet.ipc.sockets import MAX_MESSAGE_BYTES, bind

_UNREAD_BATCHES = 4096
"""Messages that a client may leave unread before it is given up."""
_HEARTBEAT_MS = 5000
_LINGER_MS = 1000


class Delivery(Enum):
    """What became of a message to a client."""

    SENT = 1
    GONE = 2
    """The client has left."""
    FULL = 3
    """The client reads too slowly to be sent more."""


class FrontDoor:
    """Bound at once, so that a taken address is known at start; `open` it inside the event loop."""

    def __init__(
        self, addresses: Iterable[str], context: zmq.Context[zmq.Socket[bytes]], key: str | None = None
    ) -> None:
        """With a `key`, only clients that have it get in."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a message to someone who left vanishes silently
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD_BATCHES)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.BACKLOG, 1024)
        # A host that is cut off says no goodbye; ZeroMQ's own ping, which every library answers, finds out.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        if key is not None:
            guard(self._socket, key)
        self._readiness: Readiness | None = None
        self._departures: Readiness | None = None
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            for address in addresses:
                bind(self._socket, address)
        except OSError:
            self.close()
            raise

    def open(self) -> None:
        """Begin to listen to the sockets; needs the running event loop."""
        self._readiness = Readiness(self._socket)
        self._departures = Readiness(self._monitor)

    async def deliver(self, take: Callable[[Messages], None], most: int) -> None:
        """Call `take` with what arrives, at most so many at a time: the client's id, then the frames it sent."""
        assert self._readiness is not None
        await self._readiness.deliver(take, most)

    async def departure(self) -> None:
        """Wait until some connection has ended; ZeroMQ does not say whose."""
        assert self._departures is not None
        await self._departures.receive()

    def send(self, client: bytes, message: bytes) -> Delivery:
        """Never waits."""
        try:
            self._socket.send_multipart((client, message), zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        finally:  # a send that fails swallows the signal of what has arrived as well
            if self._readiness is not None:
                self._readiness.refresh()
        return Delivery.SENT

    def close(self) -> None:
        """What was sent still has a second to leave, if the context is terminated after this."""
        for readiness in (self._readiness, self._departures):
            if readiness is not None:
                readiness.stop()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
