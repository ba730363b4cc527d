"""An event loop without a thread of its own: it turns in the thread that waits for what runs in it.

A call costs no hand-over from thread to thread that way. While nobody waits, nothing turns: this is for work that may
stand still meanwhile. It knows no client and no engine.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import FrameType
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, Result]]

_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
    signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
"""Of which programs make exceptions. To look after all there are takes a tenth of a first token's time on the host."""


class BorrowedLoop:
    """Any thread may call `run`. The first of several turns the loop for all, and leaves it to the next when done."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._turning = threading.RLock()
        """A signal's handler that wants something of the loop which it interrupted turns it as well."""
        self._news = threading.Condition()
        """Some work is done, or nobody turns the loop any more."""

    def run(self, work: Work[Result]) -> Result:
        """Run `work()` in the loop until it is done. What a signal's handler raises cancels it, then leaves here."""
        if asyncio._get_running_loop() is None and self._turning.acquire(blocking=False):
            return self._turn(work)
        job = _Job(work)
        self._loop.call_soon_threadsafe(job.begin)
        job.ended.add_done_callback(self._announce)
        try:
            self._wait(job.ended)
        except BaseException:
            self.soon(job.cancel)
            self._wait(job.ended)
            raise
        return job.ended.result().result()

    def soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call this in the loop when it turns, or turns again; any thread may ask. Never, if it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def close(self) -> None:
        """Cancel what still runs in it, once nobody waits for anything any more. May be called twice."""
        if asyncio._get_running_loop() is None:
            self._end()
            return
        thread = threading.Thread(target=self._end, name="borrowed-loop")  # as in `run`
        thread.start()
        thread.join()

    def _end(self) -> None:
        with self._turning:
            if not self._loop.is_closed():
                self._turn_until(self._loop.create_task(_cancel(asyncio.all_tasks(self._loop))))
                self._turn_until(self._loop.create_task(self._loop.shutdown_asyncgens()))
                self._loop.close()

    def _turn(self, work: Work[Result]) -> Result:
        try:
            task = self._loop.create_task(work())
            try:
                self._turn_until(task)
            except BaseException:
                task.cancel()
                self._turn_until(task)
                raise
            return task.result()
        finally:
            self._turning.release()
            self._announce()

    def _turn_until(self, task: asyncio.Task[Any]) -> None:
        """Until it has ended. Raises what handlers of signals raise."""
        if not task.done():
            task.add_done_callback(lambda _: self._loop.stop())
        while not task.done():
            with _LaterSignals(self._loop):
                self._loop.run_forever()

    def _wait(self, ended: Future[Any]) -> None:
        if asyncio._get_running_loop() is None:
            self._see_done(ended)
        else:  # a notebook's, in this thread, where no other can turn
            threading.Thread(target=self._see_done, args=(ended,), name="borrowed-loop", daemon=True).start()
            ended.result()

    def _see_done(self, future: Future[Any]) -> None:
        """Another thread turns the loop; this one takes over when that leaves."""
        while not future.done():
            with self._news:
                self._news.wait_for(lambda: future.done() or self._is_free())
            if not future.done() and self._turning.acquire(blocking=False):
                self._turn(lambda: _done(future))

    def _is_free(self) -> bool:
        """Whether no other thread turns the loop."""
        if free := self._turning.acquire(blocking=False):
            self._turning.release()
        return free

    def _announce(self, _: object = None) -> None:
        with self._news:
            self._news.notify_all()


class _Job(Generic[Result]):
    """Work that is done in whichever thread turns the loop."""

    def __init__(self, work: Work[Result]) -> None:
        self._work = work
        self.ended: Future[asyncio.Task[Result]] = Future()
        """Not before its own clean-up is done, even if it is cancelled."""

    def begin(self) -> None:
        self._task = asyncio.ensure_future(self._work())
        self._task.add_done_callback(self.ended.set_result)

    def cancel(self) -> None:
        self._task.cancel()


class _LaterSignals:
    """While the main thread turns the loop, a signal stops it, and the program's handler is called after that.

    Called at once, what it raises would end whichever task or callback is running: often one of those that keep the
    client alive, and whose end nobody sees. A signal that comes again before the loop has stopped does not wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._heard: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._hear)
        except ValueError:  # an interpreter within another program has no signals
            self._handlers.clear()
        except BaseException:  # from one that is still called at once
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # all of it, whatever any of them raises
            stack.callback(self._call)
            for number, handler in self._handlers.items():
                stack.callback(signal.signal, number, handler)

    def _call(self) -> None:
        with contextlib.ExitStack() as stack:
            for number, frame in self._heard.items():
                stack.callback(self._handlers[number], number, frame)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number in self._heard:
            self._handlers[number](number, frame)
        self._heard[number] = frame
        self._loop.stop()
        self._loop.call_soon_threadsafe(lambda: None)  # it may be asleep


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _done(future: Future[Any]) -> None:
    await asyncio.wait([asyncio.wrap_future(future)])
