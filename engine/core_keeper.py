"""PROCESS core keeper: keeps cores awake while the scheduler says so.

On each core that the engine may use sits a process of Linux's idle class, which takes no time that anybody else wants:
a thread that wakes up there finds the core awake. They are stopped, not ended, in between. The scheduler starts this
(`awake_cores.py`); the end of its standard input is also its own. Knows processes and cores; knows no request.
"""

import contextlib
import os
import signal
import sys

from tercet.engine.child import die_with_parent, ignore_group_signals

AWAKE, REST = b"+", b"-"

_MOST_CORES = 32


class Keeper:
    """The processes that keep cores awake, in a group of their own. They stand still at first."""

    def __init__(self, cores: set[int]) -> None:
        """Each is bound to its core; of very many cores as many are kept awake as the system likes, of its choice."""
        bound = len(cores) <= _MOST_CORES
        places = [{core} for core in sorted(cores)] if bound else [cores] * _MOST_CORES
        self._group = 0
        self._awake = False
        for place in places:
            pid = self._fork(place)
            self._group = self._group or pid

    def keep(self, *, awake: bool) -> None:
        if awake != self._awake:
            self._awake = awake
            with contextlib.suppress(ProcessLookupError):  # somebody ended them all
                os.killpg(self._group, signal.SIGCONT if awake else signal.SIGSTOP)

    def _fork(self, place: set[int]) -> int:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, self._group)
            with contextlib.suppress(OSError):  # a core that is offline by now
                os.sched_setaffinity(0, place)
            _spin()
        os.waitpid(pid, os.WUNTRACED)
        return pid


def _spin() -> None:
    """Once it is told to go on, and until the keeper ends, however it does."""
    die_with_parent()
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


def main() -> None:
    """Until the scheduler ends, or lets go of this."""
    ignore_group_signals()
    keeper = Keeper(os.sched_getaffinity(0))  # before the first is wanted
    while words := os.read(0, 4096):
        keeper.keep(awake=words.endswith(AWAKE))


if __name__ == "__main__":
    # Nothing of this is worth the time of anybody who has something to do.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if os.sched_getscheduler(0) == os.SCHED_IDLE:
        main()
    else:
        print("cores are not kept awake: this system has no idle class", file=sys.stderr)
