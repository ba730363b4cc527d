"""When a process that died is started again, and when it is enough: deaths within a window are counted. Pure.

It knows times and numbers; whose deaths they are is the supervisor's matter.
"""

from collections import deque

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 10.0


class Restarts:
    """The deaths of one kind of process."""

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._window = window
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Seconds to wait before it is started again: none at first, then longer and longer. None: too often."""
        self._deaths.append(now)
        while now - self._deaths[0] > self._window:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self._limit:
            return None
        return 0.0 if count == 1 else min(_FIRST_DELAY * 2 ** min(count - 2, 20), _LONGEST_DELAY)

    @property
    def verdict(self) -> str:
        """What to say when it is enough."""
        return f"it died {len(self._deaths)} times within {self._window:g} s (--max-restarts is {self._limit})"
