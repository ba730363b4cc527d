"""Cores that stay awake while somebody waits for a first token, or few do for each token: the scheduler's side.

On its way to a first token a request wakes process after process, each on a core that has gone to sleep meanwhile, and
cores of virtual machines take longer to wake up than the work takes. Where an answer has to match a grammar it is so
with each token. So a process of its own keeps them awake (`core_keeper.py`), for as long as it is told to. Knows the
time; who waits, the planner knows.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tercet.engine.control_groups import GROUPS, MOUNT, control_groups
from tercet.engine.core_keeper import AWAKE, REST
from tercet.engine.own_program import own_program

_ANSWER_S = 0.005
"""A first token has two processes to go."""
_LINGER_S = 0.1
"""The next request often comes right behind an answer. While others decode that would take time from them: a core's two
threads share it."""


class AwakeCores:
    """Starts the keeper with itself. If that dies cores sleep as they like again."""

    def __init__(self, *, kept: bool) -> None:
        """Unless `kept`, nothing is done."""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self._wanted_at = -_LINGER_S
        self._awake = False
        if kept:
            self._keeper = subprocess.Popen(
                own_program("core_keeper"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            assert self._keeper.stdin is not None
            os.set_blocking(self._keeper.stdin.fileno(), False)

    def look(self, now: float, *, wanted: bool, idle: bool) -> None:
        """Called in every turn of the scheduler's loop; costs a system call only where something changes.

        `wanted`: somebody waits for one of those; `idle`: nobody waits for anything.
        """
        if wanted or self._wanted:  # until now
            self._wanted_at = now
        self._wanted = wanted
        awake = now - self._wanted_at < (_LINGER_S if idle else _ANSWER_S)
        if awake != self._awake:
            self._awake = awake
            self._tell(AWAKE if awake else REST)

    def _tell(self, word: bytes) -> None:
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        try:
            os.write(self._keeper.stdin.fileno(), word)
        except BlockingIOError:  # it has not had a core for thousands of words
            pass
        except BrokenPipeError:
            if status := self._keeper.wait():  # else it has said why
                print(f"the keeper of cores ended with status {status}; they are not kept awake", file=sys.stderr)
            self._keeper = None


def has_quota(groups: Path = GROUPS, mount: Path = MOUNT) -> bool:
    """Whether a container's limit bounds the time of this process: what cores spend awake would count."""
    return any(map(_limits, control_groups("cpu", groups, mount)))


def _limits(folder: Path) -> bool:
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError):
            return folder.joinpath(name).read_text().split()[0] not in ("max", "-1")
    return False
