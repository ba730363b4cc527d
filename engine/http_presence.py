"""Whether the client of a request is still there: when it leaves, the work for it ends where it is.

The work stays in the request's own task, so that what it waits for wakes nobody else first. It knows nothing of what is
sent.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")
_STALLED_SECONDS = 60.0


class ClientGone(Exception):
    """Whoever asked has left; there is nobody to answer."""


class Presence:
    """While entered, the client's leaving cancels the task that entered it; that comes out as `ClientGone`."""

    def __init__(self, receive: Receive, num_taken: Callable[[], int | None] | None = None) -> None:
        """`num_taken`: how much the client has taken of what it is being sent; None while nothing is.

        One that takes nothing for a minute, or twice that, has gone, whatever its connection says.
        """
        self._receive = receive
        self._num_taken = num_taken
        self._seen: int | None = None
        self._watching: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_gone = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        # Not now: the work comes first.
        self._beginning = asyncio.get_running_loop().call_soon(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beginning.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._has_gone:
            self._task.uncancel()
            raise ClientGone from error

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._watch())
        if self._num_taken is not None:
            self._timer = asyncio.get_running_loop().call_later(_STALLED_SECONDS, self._look, self._num_taken)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._give_up()

    def _look(self, num_taken: Callable[[], int | None]) -> None:
        """Now and then: a timer for each event would cost as much as all the rest."""
        taken = num_taken()
        if taken is not None and taken == self._seen:
            self._give_up()
        else:
            self._seen = taken
            self._timer = asyncio.get_running_loop().call_later(_STALLED_SECONDS, self._look, num_taken)

    def _give_up(self) -> None:
        if not self._has_gone:
            self._has_gone = True
            self._task.cancel()


async def unless_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """Do the work until it is done or the client leaves. Raises `ClientGone`."""
    with Presence(receive):
        return await work
