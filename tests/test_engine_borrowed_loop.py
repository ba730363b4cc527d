"""A loop that turns in the thread that waits: one thread, several, a thread with a loop of its own, interrupts."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from tercet.engine.borrowed_loop import BorrowedLoop


@pytest.fixture
def loop() -> Iterator[BorrowedLoop]:
    loop = BorrowedLoop()
    yield loop
    loop.close()


async def echo(value: int, seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    return value


def test_results_and_errors_are_the_callers(loop: BorrowedLoop) -> None:
    async def fail() -> None:
        raise LookupError("lost")

    assert loop.run(lambda: echo(3)) == 3
    with pytest.raises(LookupError, match="lost"):
        loop.run(fail)
    assert loop.run(lambda: echo(4)) == 4


def test_what_was_begun_goes_on_when_the_loop_turns_again(loop: BorrowedLoop) -> None:
    async def begin() -> asyncio.Task[int]:
        return asyncio.ensure_future(echo(5, 0.01))

    task = loop.run(begin)

    async def join() -> int:
        return await task

    assert loop.run(join) == 5


def test_threads_share_it_and_the_first_to_leave_leaves_it_to_the_others(loop: BorrowedLoop) -> None:
    meeting = threading.Barrier(4)

    def call(index: int) -> int:
        meeting.wait()
        return loop.run(lambda: echo(index, 0.02 * (index + 1)))

    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert list(threads.map(call, range(4))) == [0, 1, 2, 3]


def test_all_run_at_once(loop: BorrowedLoop) -> None:
    """Work that waits for another thread's work."""
    met: asyncio.Future[int] = loop.run(lambda: _new_future())

    async def wait() -> int:
        return await met

    async def tell() -> None:
        met.set_result(6)

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(loop.run, wait)
        threads.submit(loop.run, tell).result(timeout=20)
        assert waiting.result(timeout=20) == 6


async def _new_future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


def test_a_thread_that_has_a_running_loop(loop: BorrowedLoop) -> None:
    async def notebook() -> int:
        return loop.run(lambda: echo(7))

    for _ in range(20):
        assert asyncio.run(notebook()) == 7


def test_callbacks_wait_for_the_next_turn(loop: BorrowedLoop) -> None:
    said: list[int] = []
    loop.soon(said.append, 8)
    assert not said
    loop.run(lambda: echo(0))
    assert said == [8]


@pytest.mark.parametrize("beside", [False, True])
def test_an_interrupt_cancels_the_work(loop: BorrowedLoop, beside: bool) -> None:
    cancelled = threading.Event()

    async def work() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(loop.run, lambda: echo(9, 0.5)) if beside else None
        while beside and loop._is_free():
            pass
        with pytest.raises(KeyboardInterrupt):
            loop.run(work)
        assert other is None or other.result(timeout=20) == 9
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert loop.run(lambda: echo(1)) == 1
    assert cancelled.is_set()


def test_a_programs_own_handler_stays(loop: BorrowedLoop) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert loop.run(lambda: echo(2, 0.2)) == 2
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


@pytest.fixture
def alarm() -> Iterator[None]:
    """The program's own handler raises."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the program's own")

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("asleep", [True, False])
def test_what_a_programs_handler_raises_cancels_the_work_and_nothing_else(loop: BorrowedLoop, asleep: bool) -> None:
    said: list[str] = []

    async def hear(name: str, ring: bool) -> None:
        try:
            if ring:
                signal.raise_signal(signal.SIGALRM)  # among callbacks and tasks, none of which is to get the error
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            said.append(f"{name} was cancelled")
            raise

    async def work() -> None:
        beside.append(asyncio.ensure_future(hear("beside", not asleep)))
        if asleep:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGALRM)).start()
        await hear("work", False)

    beside: list[asyncio.Task[None]] = []
    with pytest.raises(TimeoutError, match="the program's own"):
        loop.run(work)
    assert said == ["work was cancelled"]
    assert signal.getsignal(signal.SIGALRM).__name__ == "ring"  # type: ignore[union-attr]
    assert loop.run(lambda: echo(1)) == 1
    assert not beside[0].done()


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("takes_over", [True, False])
def test_work_that_another_thread_turned_is_cancelled_too(loop: BorrowedLoop, takes_over: bool) -> None:
    """Whether that thread still turns the loop, or has left it to the one with the work."""
    other_may_end: asyncio.Event = loop.run(lambda: _new_event())
    said: list[str] = []

    async def work() -> None:
        if takes_over:
            other_may_end.set()
            while other.running():  # it has left once this is not turned by it
                await asyncio.sleep(0)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGALRM)).start()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            said.append("cancelled")
            other_may_end.set()

    async def other_work() -> None:
        await other_may_end.wait()

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(loop.run, other_work)
        while loop._is_free():
            pass
        with pytest.raises(TimeoutError, match="the program's own"):
            loop.run(work)
        assert said == ["cancelled"]
        other.result(timeout=20)


async def _new_event() -> asyncio.Event:
    return asyncio.Event()


def test_closing_cancels_what_is_left() -> None:
    loop = BorrowedLoop()
    tasks: list[asyncio.Task[int]] = []

    async def begin() -> None:
        tasks.append(asyncio.ensure_future(echo(0, 60)))

    loop.run(begin)
    loop.close()
    assert tasks[0].cancelled()
    loop.soon(print, "never")
