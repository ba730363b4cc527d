"""Where the seconds of a start go: each process notes when its phases end, and whoever started it adds the rest.

Knows names and seconds; what the phases do, those who name them know.
"""

import time
from collections.abc import Callable, Mapping

_SHOWN = 0.05
"""Shorter phases are left out where people read."""


class StartClock:
    """Told at the end of each phase: what has passed since the one before was that phase."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        """Seconds of each, in order; together all that has passed until the last was ended."""
        self.settle: Callable[[], object] = lambda: None
        """Waits for a device that is behind, so that a phase pays for its own work."""
        self._since = time.monotonic()

    def ended(self, phase: str) -> None:
        self.settle()
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
        self._since = now


def in_words(phases: Mapping[str, float]) -> str:
    """One line of the phases that count."""
    return ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items() if seconds >= _SHOWN)
