"""Cores that stay awake while somebody waits for a first token.

On its way to one a request wakes process after process, each on a core that has gone to sleep meanwhile, and cores take
longer to wake up than the work takes. Linux has a file for that: as long as somebody holds it open with a number in it,
no core sleeps so deeply that it needs more microseconds than that. It is for root, and containers often have none:
where it cannot be opened, cores sleep as they like. Knows the file and the time; who waits, the planner knows.
"""

import contextlib
import os
from pathlib import Path

FILE = Path("/dev/cpu_dma_latency")
_DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
_LINGER_S = 0.1
"""The next request often comes right behind an answer, and the answer itself has two processes to go."""
_ANY_US = 2_000_000_000
"""What Linux takes for no wish at all."""


class AwakeCores:
    """This process's wish, which ends with it."""

    def __init__(self, file: Path | None, driver: Path = _DRIVER) -> None:
        """Without a `file` nothing is wished."""
        self._wish: int | None = None
        self._until = 0.0
        self._awake = False
        self._least_us = _least_us(driver)
        if file is not None:
            with contextlib.suppress(OSError):
                self._wish = os.open(file, os.O_WRONLY | os.O_CLOEXEC)

    def look(self, now: float, *, wanted: bool) -> None:
        """Called in every turn of the scheduler's loop; costs a system call only where something changes."""
        if wanted:
            self._until = now + _LINGER_S
        awake = now < self._until
        if self._wish is not None and awake != self._awake:
            self._awake = awake
            os.write(self._wish, (self._least_us if awake else _ANY_US).to_bytes(4, "little"))


def _least_us(driver: Path) -> int:
    """A real core's lightest sleep costs a microsecond and little power; a virtual one's says so, too, and costs 50."""
    with contextlib.suppress(OSError):
        return 0 if driver.read_text().strip() == "haltpoll" else 1
    return 1
