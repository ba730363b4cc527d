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

    def __init__(self, receive: Receive, num_taken: Callable[[], int | None] = lambda: None) -> None:
        """`num_taken`: how much the client has taken of what it is being sent; None while nothing is.

        One that takes nothing for a minute, or twice that, has gone, whatever its connection says.
        """
        self._receive = receive
        self._num_taken = num_taken
        self._has_gone = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watching = asyncio.ensure_future(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        if self._has_gone:
            self._task.uncancel()
            raise ClientGone from error

    async def _watch(self) -> None:
        # A look now and then: a timer for each event would cost as much as all the rest.
        seen = None
        while not await _leaves(self._receive, _STALLED_SECONDS):
            taken = self._num_taken()
            if taken is not None and taken == seen:
                break
            seen = taken
        self._has_gone = True
        self._task.cancel()


async def unless_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """Do the work until it is done or the client leaves. Raises `ClientGone`."""
    with Presence(receive):
        return await work


async def _leaves(receive: Receive, within: float) -> bool:
    try:
        async with asyncio.timeout(within):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True
