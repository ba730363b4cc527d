"""Tokens on their way from the device to whoever waits for them.

On a GPU the sampling kernel writes them into a ring of pinned memory, at the turn that the device counts: no copy, and
launching a step never waits for an earlier one unless the whole ring is in use. Knows memory and events, not steps.
"""

import threading
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tercet.ipc.beyond import Beyond
from tercet.model.step_extra import StepExtra
from tercet.model.stopwatch import NoStopwatch, Stopwatch
from tercet.triton_kernels.sample import TokenRing

_TIMEOUT_S = 600.0


class Landing(Protocol):
    """The tokens of one step."""

    def wait(self) -> NDArray[np.int32]:
        """int32 token per row, decodes then chunks; -1 where a row sampled none. Called once, by any thread."""
        ...

    def beyond(self) -> Beyond:
        """After `wait`: log-probabilities and embeddings, where they are wanted."""
        ...


class Midway(Protocol):
    """A step that awaits masks, on its way to its draw."""

    def wait(self) -> None:
        """Until the device has come to it. Called once, by any thread."""
        ...


class DoneMidway:
    """It is there already."""

    def wait(self) -> None:
        pass


class EventMidway:
    """It is there when an event is."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class DoneLanding:
    """Tokens that are there already."""

    def __init__(self, token_ids_R: NDArray[np.int32], extra: StepExtra | None = None) -> None:
        self._token_ids_R = token_ids_R
        self._extra = extra

    def wait(self) -> NDArray[np.int32]:
        return self._token_ids_R

    def beyond(self) -> Beyond:
        return (None, (), ()) if self._extra is None else self._extra.messages()


def num_landings(run_ahead: int, max_lease: int) -> int:
    """Steps whose tokens nobody may have taken yet: of the plans in flight, of one that ends and of one that begins."""
    return (run_ahead + 2) * max_lease


class LandingRing:
    """Pinned places for the tokens of steps in flight. Host and device count the turns each for itself."""

    def __init__(self, depth: int, max_rows: int, device: torch.device, *, timed: bool = False) -> None:
        places_KR = torch.zeros(depth, max_rows, dtype=torch.int32, pin_memory=True)
        self.ring = TokenRing(places_KR, torch.zeros(1, dtype=torch.int32, device=device))
        self._arrays: NDArray[np.int32] = places_KR.numpy()
        self._events = [torch.cuda.Event(enable_timing=timed) for _ in range(depth)]
        self._stopwatch = Stopwatch(self._events) if timed else NoStopwatch()
        self._midway = [torch.cuda.Event() for _ in range(depth)]
        self._in_use = [threading.Lock() for _ in range(depth)]
        self._turn = 0
        self._is_reserved = False

    def restart(self) -> None:
        """Before the first step that counts: forget the turns of warming up."""
        self.ring.turn_1.zero_()

    def reserve(self) -> None:
        """Before each launch: wait until the next place is free. One whose step was given up before its draw is."""
        if self._is_reserved:
            return
        self._turn = (self._turn + 1) % len(self._events)
        if not self._in_use[self._turn].acquire(timeout=_TIMEOUT_S):  # nobody waits for tokens any more
            raise TimeoutError(f"nobody took the tokens of a step for {_TIMEOUT_S:g} s")
        self._is_reserved = True

    def launching(self) -> None:
        """Between `reserve` and the launch."""
        self._stopwatch.start(self._turn)

    def midway(self) -> "EventMidway":
        """After the launch of a step up to its draw."""
        event = self._midway[self._turn]
        event.record()
        return EventMidway(event)

    def launched(self, rows: NDArray[np.intp] | slice, extra: StepExtra | None = None) -> Landing:
        """After each launch. `rows`: which of the step's rows are not padding."""
        self._events[self._turn].record()
        self._is_reserved = False
        return _RingLanding(self, self._turn, rows, extra)

    def take(self, place: int, rows: NDArray[np.intp] | slice) -> tuple[NDArray[np.int32], tuple[int, int]]:
        """Wait for one place's tokens, and free it. Also when the step ran, where that is known."""
        self._events[place].synchronize()
        token_ids = self._arrays[place, rows].copy()
        interval_ns = self._stopwatch.interval_ns(place)
        self._in_use[place].release()
        return token_ids, interval_ns


class _RingLanding:
    def __init__(self, ring: LandingRing, place: int, rows: NDArray[np.intp] | slice, extra: StepExtra | None) -> None:
        self._extra = extra
        self._ring = ring
        self._place = place
        self._rows = rows
        self.interval_ns = (0, 0)
        """When the step ran, on the host's monotonic clock: known after `wait`, if steps are timed."""

    def wait(self) -> NDArray[np.int32]:
        token_ids, self.interval_ns = self._ring.take(self._place, self._rows)
        return token_ids

    def beyond(self) -> Beyond:
        return (None, (), ()) if self._extra is None else self._extra.messages()
