"""When a process takes the address that clients know: at once, or once an engine that is about to end has left it.

At once is the rule: an address in use is known before a model is loaded. With `--take-over` everything is loaded first,
so that between the old engine and the new one lies a moment.
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import zmq

from tercet.engine.child import SupervisorLink
from tercet.engine.errors import AddressTaken, StartupFailed
from tercet.engine.system_limits import raise_file_limit
from tercet.ipc.front_door import FrontDoor
from tercet.ipc.process_messages import Phase
from tercet.ipc.sockets import AddressInUse

Door = TypeVar("Door")

_RETRY_SECONDS = 0.02


class Doors(Generic[Door]):
    """What `bind` binds; it raises `AddressTaken` when another process has the address."""

    def __init__(self, link: SupervisorLink, bind: Callable[[], Door]) -> None:
        raise_file_limit()
        self._link = link
        self._bind = bind
        self._door = None if link.spec.config.take_over else self._take()

    def open(self) -> Door:
        """Bound, in the end: the supervisor keeps the deadline."""
        waits = False
        while self._door is None:
            try:
                self._door = self._take()
            except AddressTaken:
                if not waits:
                    waits = True
                    self._link.tell(Phase("waiting for the old engine to leave its address", 1, 1))
                time.sleep(_RETRY_SECONDS)
        return self._door

    def _take(self) -> Door:
        door = self._bind()
        self._link.bound = True
        return door


def bind_front_door(addresses: Sequence[str], context: zmq.Context[zmq.Socket[bytes]], key: str | None) -> FrontDoor:
    """ZeroMQ's, with errors that say what is in the way."""
    try:
        return FrontDoor(addresses, context, key)
    except AddressInUse as error:
        raise AddressTaken(str(error)) from None
    except OSError as error:
        raise StartupFailed(str(error)) from None
