"""PROCESS core keeper: keeps those cores awake on which the engine's threads run, while the scheduler says so.

On each such core sits a process of Linux's idle class, which takes no time that anybody else wants: a thread that wakes
up there finds the core awake. They are stopped, not ended, in between. The scheduler starts this (`awake_cores.py`);
the end of its standard input is also its own. Knows processes and cores; knows no request.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tercet.engine.child import die_with_parent, ignore_group_signals

AWAKE, REST = b"+", b"-"

_LOOK_S = 0.1
_MOST_LOOKS = 20
"""Threads mostly stay where they are, or come back: it is looked every so often, and remembered for so many looks."""
_SAME_S = 5.0
"""For so long the engine is taken to have the same threads."""
_MOST_CORES = 32
_PROCESSOR = 36
"""Place of the core that a thread was last on among what its `stat` says behind its name."""


class Keeper:
    """The processes that keep cores awake, one each."""

    def __init__(self) -> None:
        self._cores: dict[int, int] = {}
        """Of each process: the core that it is bound to."""
        self._running: set[int] = set()

    def keep(self, cores: set[int]) -> None:
        """Keep these awake, and no others."""
        cores = set(sorted(cores)[:_MOST_CORES])
        for pid in [pid for pid in self._running if self._cores[pid] not in cores]:
            self._stop(pid)
        for core in cores - {self._cores[pid] for pid in self._running}:
            pid = next((pid for pid in self._cores if pid not in self._running), None) or self._fork()
            with contextlib.suppress(OSError):  # a core that is offline by now, or that we may not use
                os.sched_setaffinity(pid, {core})
                self._cores[pid] = core
                self._running.add(pid)
                os.kill(pid, signal.SIGCONT)

    def _stop(self, pid: int) -> None:
        self._running.remove(pid)
        os.kill(pid, signal.SIGSTOP)

    def _fork(self) -> int:
        """A process that stands still."""
        pid = os.fork()
        if pid == 0:
            _spin()
        os.waitpid(pid, os.WUNTRACED)
        self._cores[pid] = -1
        return pid


def _spin() -> None:
    """Once it is told to go on, and until the keeper ends, however it does."""
    die_with_parent()
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


class Places:
    """On which cores an engine's threads have run of late."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._threads: list[Path] = []
        self._stale_at = 0.0
        self._num_looks = 0
        self._seen: dict[int, int] = {}
        """Of each core: in which look."""

    @property
    def cores(self) -> set[int]:
        return {core for core, at in self._seen.items() if self._num_looks - at < _MOST_LOOKS}

    def look(self, now: float) -> None:
        if now > self._stale_at:
            self._threads, self._stale_at = engine_threads(self._supervisor), now + _SAME_S
        self._num_looks += 1
        for thread in self._threads:
            try:
                self._seen[int(_behind_name(thread)[_PROCESSOR])] = self._num_looks
            except OSError:  # it has ended, and another may have begun in its place
                self._stale_at = 0.0


def engine_threads(supervisor: int) -> list[Path]:
    """Of an engine's processes, and of the program that owns it: main threads, and those that move messages."""
    pids, found = list[int](), list[Path]()
    with contextlib.suppress(OSError):  # it has just ended, and so does this
        pids += _children(supervisor)
        if b"tercet.engine.owned_supervisor" in Path(f"/proc/{supervisor}/cmdline").read_bytes():
            pids.append(_parent(supervisor))
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                name = thread.joinpath("comm").read_text()
                if thread.name == str(pid) or name.startswith("ZMQbg/IO"):
                    found.append(thread / "stat")
    return found


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, thread.joinpath("children").read_text().split())


def _parent(pid: int) -> int:
    return int(_behind_name(Path(f"/proc/{pid}/stat"))[1])


def _behind_name(stat: Path) -> list[str]:
    """A thread's name may hold anything."""
    return stat.read_text().rpartition(")")[2].split()


def main() -> None:
    """Until the scheduler ends, or lets go of this."""
    ignore_group_signals()
    keeper, places = Keeper(), Places(_parent(os.getppid()))
    places.look(time.monotonic())
    keeper.keep(places.cores)  # processes are there when they are first wanted
    keeper.keep(set())
    awake = False
    while True:
        if select.select([0], [], [], _LOOK_S if awake else None)[0]:
            words = os.read(0, 4096)
            if not words:
                return
            awake = words.endswith(AWAKE)
            keeper.keep(places.cores if awake else set())  # at once; looking takes a millisecond
        if awake:
            places.look(time.monotonic())
            keeper.keep(places.cores)


if __name__ == "__main__":
    # Nothing of this is worth the time of anybody who has something to do.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if os.sched_getscheduler(0) == os.SCHED_IDLE:
        main()
    else:
        print("cores are not kept awake: this system has no idle class", file=sys.stderr)
