"""The tokenizer's way to a replica's scheduler, and to each successor of one that died.

It knows what is to be said; what for is the desk's matter.
"""

import asyncio
import time
from array import array
from collections.abc import Callable

import anyio

from tercet.engine.front_desk import FrontDesk
from tercet.ipc.sockets import Outbox
from tercet.ipc.step_messages import Abort, Forget, Submit

_RETRY_S = 0.01
"""Between attempts to submit to a scheduler that is far behind."""


class SchedulerLine:
    """Made inside a running event loop."""

    def __init__(self, connect: Callable[[], Outbox]) -> None:
        """`connect` makes the way to the scheduler, and another one to its successor."""
        self._connect = connect
        self._scheduler = connect()
        self._succeeded = asyncio.Event()
        self._unsent_aborts: list[int] = []

    def submit(self, submit: Submit) -> bool:
        """Whether it could be sent; not to a scheduler that is far behind."""
        return self._scheduler.try_send(submit)

    def note_abort(self, number: int) -> None:
        """To be sent with the next, at the latest with those of the next tick."""
        self._unsent_aborts.append(number)

    def send_aborts(self) -> None:
        """Now, or later with others."""
        if self._unsent_aborts and self._scheduler.try_send(Abort(array("q", self._unsent_aborts).tobytes())):
            self._unsent_aborts = []

    def forget(self, before: int) -> None:
        """Requests of lower numbers are nobody's."""
        self._scheduler.send(Forget(before))

    def succeed(self) -> None:
        """There is a new scheduler, that knows nobody."""
        self._succeeded.set()

    async def follow(self, desk: FrontDesk, replica: int) -> None:
        """To each new scheduler: all that is live with its replica, from where it stands."""
        while True:
            await self._succeeded.wait()
            self._succeeded.clear()
            self._scheduler.abandon()  # what the old one has not got must not reach the new one
            self._scheduler = self._connect()
            self._unsent_aborts.clear()
            self.forget(desk.next_number)
            for asked in desk.renumber(replica):
                while asked.answers and not self._succeeded.is_set():
                    if self.submit(asked.submit(time.monotonic(), again=True)):
                        break
                    await anyio.sleep(_RETRY_S)

    def close(self) -> None:
        self._scheduler.close()
