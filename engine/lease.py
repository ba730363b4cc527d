"""How many decode steps one plan may grant, and when none yet. Pure: no clock but the argument `now`.

Granted steps cannot be taken back, so a new prompt waits for all that is in flight. Leases are there to hide the way of
a message, which is a matter of time: where a step takes longer than that, a plan for one step hides it as well.
"""

import math
from collections import deque

_NUM_INTERVALS = 8
_LONG_PROMPTS, _BURST_SECONDS = 1024, 0.001
"""Prompts of so many tokens keep a GPU busy for longer than this and a plan's way, but for the smallest of models."""


class Lease:
    """Watches how long decode steps take, and grants `seconds` of them."""

    def __init__(self, most_steps: int, seconds: float) -> None:
        self._most_steps = most_steps
        self._seconds = seconds
        self._intervals: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self._last: float | None = None
        """When the step before was complete, if the next one followed it at once."""
        self._burst_until = 0.0

    def prompts_planned(self, num_tokens: int, now: float) -> None:
        """A plan computes so many tokens of prompts. Others may come right behind it, and would come behind a lease."""
        if num_tokens >= _LONG_PROMPTS:
            self._burst_until = now + _BURST_SECONDS

    def patience(self, now: float) -> float:
        """Seconds for which it is better to grant nothing, while prompts keep the device busy."""
        return max(0.0, self._burst_until - now)

    def completed(self, now: float, *, is_decode: bool, more_in_flight: bool) -> float | None:
        """A step is complete. Several may be at the same `now`: only their mean is taken for anything.

        Returns how long it took, if it is of decodes alone and that is known.
        """
        seconds = now - self._last if is_decode and self._last is not None else None
        if seconds is not None:
            self._intervals.append(seconds)
        self._last = now if more_in_flight else None
        return seconds

    @property
    def step_seconds(self) -> float:
        """How long a decode step takes; 0 as long as nothing is known."""
        return sum(self._intervals) / len(self._intervals) if self._intervals else 0.0

    @property
    def steps(self) -> int:
        """What the next plan may grant; as long as nothing is known, the most."""
        mean = self.step_seconds
        if mean * self._most_steps <= self._seconds:
            return self._most_steps
        return max(1, math.ceil(self._seconds / mean))
