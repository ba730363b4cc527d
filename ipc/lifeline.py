"""A client's way to its engine through many connections: when one ends, the next is made.

It moves bytes, and knows when something was last heard and since when nobody is there; it knows no message.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread
import zmq

from tercet.ipc.connection import Connection

_RETRY_S = 0.25
"""After a connection that somebody ended before it was up: they would do so again at once, and again."""


class Lifeline:
    """Made inside a running event loop; `close` it."""

    def __init__(
        self, address: str, key: str | None, take: Callable[[bytes], None], renewed: Callable[[bool], None]
    ) -> None:
        """`take` gets each message; `renewed` is called when a connection has ended and a new one takes its place,
        with whether anybody had ever answered on the old one.

        Raises `ValueError` for an address that is none.
        """
        self._address, self._key = address, key
        self._take, self._renewed = take, renewed
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connected = asyncio.Event()
        self.lost_at: float | None = None
        """When the last connection ended, until somebody answers again. In the loop's time, as `last_heard`."""
        self.last_heard = 0.0
        self.silence = 0.0
        """Seconds of `listen` since then."""
        self._is_refused = False
        """The last connection ended before it was up: who is there wants another key, or is no engine."""
        try:
            self._connection = Connection(self._context, address, key)
        except ValueError:
            self._context.term()
            raise
        self._keeping = asyncio.ensure_future(self._keep_connected())

    def check_loop(self) -> None:
        """Raises `RuntimeError` in another event loop than where it was made: nothing would ever come there."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this client was opened in another event loop; want one that was opened in this one")

    def send(self, message: bytes) -> None:
        """Never waits."""
        self._connection.send(message)

    async def is_up(self, within: float) -> bool:
        """Whether somebody answers at the address, now or within so many seconds, if nobody says `stop_waiting`."""
        if not self._connected.is_set():
            with anyio.move_on_after(within):
                await self._connected.wait()
        return self._connected.is_set()

    async def listen(self, seconds: float) -> bool:
        """Let so much time pass. False if it was far more: the loop was held up, or the machine slept.

        That is no silence of the other side, and what has come meanwhile is yet to be read.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(seconds)
        is_late = loop.time() - began > 2 * seconds
        if self.last_heard > began:
            self.silence = 0.0
        elif not is_late:
            self.silence += seconds
        return not is_late

    @property
    def advice(self) -> str:
        """For who gets no answer."""
        if not self._is_refused:
            return f"is it serving, and with{' this' if self._key else 'out a'} key?"
        given = "this key, or asks for none" if self._key else "clients without a key"
        return f"who listens there refuses {given} (`key` of Client; --listen-key or TERCET_LISTEN_KEY of programs)"

    def stop_waiting(self) -> None:
        """Nobody is to wait for an answer any more."""
        self._connected.set()

    async def close(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        self._connection.close(lingers=self.lost_at is None)  # where nobody is there, nothing has to leave
        # In a thread of its own: the program's may all be busy. It takes as long as a connection lingers.
        await anyio.to_thread.run_sync(self._context.term, limiter=anyio.CapacityLimiter(1))

    async def _keep_connected(self) -> None:
        """One connection after the other."""
        loop = asyncio.get_running_loop()
        while True:
            was_up = False
            receiving = asyncio.ensure_future(self._connection.deliver(self._hear))
            try:
                while await self._connection.is_up():
                    was_up, self.lost_at, self._is_refused = True, None, False
                    self.last_heard = loop.time()
                    self._connected.set()
            finally:
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
            if not was_up:
                self._is_refused = True
                await asyncio.sleep(_RETRY_S)
            for message in self._connection.receive_rest():
                self._take(message)
            self._connected.clear()
            self._connection.close()
            self._connection = Connection(self._context, self._address, self._key)
            self.lost_at = self.lost_at or loop.time()
            self._renewed(was_up)

    def _hear(self, messages: list[bytes]) -> None:
        self.last_heard = asyncio.get_running_loop().time()
        for message in messages:
            self._take(message)


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for it, though this task was or is cancelled; that is raised when it is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
