"""A request whose answer has not come yet: how long it is waited for, whom it is asked again, and what ends it badly.

What comes of it is its subclasses' matter: `Call` collects texts, `EmbedCall` and `ClassifyCall` have one vector. It
knows no socket.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import anyio

from tercet.ipc.answers import News
from tercet.ipc.errors import ClientError, RequestTimedOut
from tercet.ipc.messages import Request

Result = TypeVar("Result")
Whole = TypeVar("Whole")


class Pending(ABC, Generic[Whole]):
    """One request, and what it comes to as a whole."""

    def __init__(self, request: Request, timeout: float | None) -> None:
        """`timeout`: seconds from now that it may take in all."""
        self.request = request
        self._timeout = timeout
        self._deadline = None if timeout is None else anyio.current_time() + timeout
        self.num_losses = 0
        """Connections that ended since there was any news."""
        self._waits: tuple[ClientError, float] | None = None
        """For a successor of the engine: what to say if none comes, and when."""
        self.has_begun = False
        """Whether any of an answer has come."""
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: ClientError | None = None

    @abstractmethod
    def take(self, item: News) -> bool:
        """Whether all has come now."""

    @abstractmethod
    def _rest(self) -> Request:
        """The same request, for what has not come yet."""

    @abstractmethod
    async def whole(self) -> Whole:
        """All of it, once it is there. Raises what ended it badly."""

    def rest(self, was_asked: bool) -> Request:
        """After a loss: the same request again, for what has not come yet.

        `was_asked`: whether it can have reached anybody, and be what ended the connection.
        """
        self.num_losses += was_asked
        self._waits = None
        return self._rest()

    def wait_for_successor(self, error: ClientError, until: float) -> None:
        """The engine is shutting down. If nobody takes its place until then, this is how the request ends."""
        self._waits = error, until

    def gave_up_waiting(self, now: float) -> bool:
        """Whether it has failed because no successor came."""
        if self._waits is None or now < self._waits[1]:
            return False
        self.fail(self._waits[0])
        return True

    def fail(self, error: ClientError) -> None:
        self._error = error
        self._announce()

    async def in_time(self, waiting: Coroutine[Any, Any, Result]) -> Result:
        """What is waited for, if it comes before the request's time is over. Raises `RequestTimedOut`."""
        if self._deadline is None:
            return await waiting
        try:
            with anyio.fail_after(max(0.0, self._deadline - anyio.current_time())):
                return await waiting
        except TimeoutError:
            raise RequestTimedOut("timed_out", f"the request had {self._timeout:g} s and was cancelled") from None

    def _announce(self) -> None:
        """An event for one who waits; asyncio's own is for many, and takes twice the time."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        if self._has_news:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
