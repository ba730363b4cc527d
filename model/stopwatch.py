"""When steps ran on the device, told in the host's monotonic clock.

The device stamps events; the time between two is exact, and one of them, the anchor, is known in the host's clock. The
difference is a float of milliseconds, so a new anchor takes over every few seconds, itself timed by the one before it.
Nothing here waits for the device but the first anchor.
"""

import time
from collections.abc import Sequence

import torch

_NUM_ANCHORS = 16
_ANCHOR_NS = 5_000_000_000
"""How long an anchor serves: the float is good to a microsecond up to there."""


class NoStopwatch:
    """Does nothing, and costs that."""

    def start(self, place: int) -> None:
        pass

    def interval_ns(self, place: int) -> tuple[int, int]:
        return 0, 0


class Stopwatch:
    """Times what runs between `start` and an event. One thread starts, in order; one thread reads, in the same order.

    It must not lag by more than `_NUM_ANCHORS - 1` anchors.
    """

    def __init__(self, ends: Sequence[torch.cuda.Event]) -> None:
        """`ends`: the events, one a place, that are recorded when what is timed has been launched."""
        self._ends = ends
        self._starts = [_event() for _ in ends]
        self._anchors = [_event() for _ in range(_NUM_ANCHORS)]
        self._anchor_of = [0] * len(ends)
        """Which anchor was the newest when a place was started; counts on without end."""
        self._newest, self._known = 0, 0
        self._anchored_ns, self._known_ns = _anchor_on_host(self._anchors[0])

    def start(self, place: int) -> None:
        """Just before the launch."""
        now = time.monotonic_ns()
        if now - self._anchored_ns > _ANCHOR_NS:
            self._anchors[(self._newest + 1) % _NUM_ANCHORS].record()
            self._newest += 1
            self._anchored_ns = now
        self._anchor_of[place] = self._newest
        self._starts[place].record()

    def interval_ns(self, place: int) -> tuple[int, int]:
        """After the place's end event has happened."""
        while self._known < self._anchor_of[place]:
            anchor, successor = (self._anchors[index % _NUM_ANCHORS] for index in (self._known, self._known + 1))
            self._known_ns += round(1e6 * anchor.elapsed_time(successor))
            self._known += 1
        anchor = self._anchors[self._known % _NUM_ANCHORS]
        begin, end = (anchor.elapsed_time(event) for event in (self._starts[place], self._ends[place]))
        return self._known_ns + round(1e6 * begin), self._known_ns + round(1e6 * end)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _anchor_on_host(event: torch.cuda.Event) -> tuple[int, int]:
    """Record an event in a moment that is known well: when it was over, and when the event happened."""
    torch.cuda.current_stream().synchronize()
    tightest = min(after - before for before, after in (_record(event) for _ in range(10)))
    for _ in range(100):
        before, after = _record(event)
        if after - before <= 1.2 * tightest:
            break
    return after, (before + after) // 2


def _record(event: torch.cuda.Event) -> tuple[int, int]:
    before = time.monotonic_ns()
    event.record()
    event.synchronize()
    return before, time.monotonic_ns()
