"""Tokens on their way from the device to whoever waits for them.

On a GPU they leave through a ring of pinned memory: launching a step never waits for an earlier one unless the whole
ring is in use. Knows bytes and events, not steps.
"""

import queue
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TIMEOUT_S = 600.0


class Landing(Protocol):
    """The tokens of one step."""

    def wait(self) -> NDArray[np.int32]:
        """int32 token per row, decodes then chunks; -1 where a row sampled none. Called once, by any thread."""
        ...


class DoneLanding:
    """Tokens that are there already."""

    def __init__(self, token_ids_R: NDArray[np.int32]) -> None:
        self._token_ids_R = token_ids_R

    def wait(self) -> NDArray[np.int32]:
        return self._token_ids_R


class LandingRing:
    """Pinned places for the tokens of steps in flight."""

    def __init__(self, depth: int, max_rows: int) -> None:
        self._memory = torch.zeros(depth, max_rows, dtype=torch.int32, pin_memory=True)
        self._arrays: NDArray[np.int32] = self._memory.numpy()
        self._events = [torch.cuda.Event() for _ in range(depth)]  # type: ignore[no-untyped-call]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(depth):
            self._free.put(place)

    def send(self, token_ids_R: Tensor, rows: NDArray[np.intp] | slice) -> Landing:
        """Start copying on the current stream. `rows`: which of the step's rows are not padding."""
        place = self._free.get(timeout=_TIMEOUT_S)  # only to notice that nobody waits any more
        self._memory[place, : token_ids_R.shape[0]].copy_(token_ids_R, non_blocking=True)
        self._events[place].record()
        return _RingLanding(self, place, rows)

    def take(self, place: int, rows: NDArray[np.intp] | slice) -> NDArray[np.int32]:
        """Wait for one place's tokens, and free it."""
        self._events[place].synchronize()
        token_ids = self._arrays[place, rows].copy()
        self._free.put(place)
        return token_ids


class _RingLanding:
    def __init__(self, ring: LandingRing, place: int, rows: NDArray[np.intp] | slice) -> None:
        self._ring = ring
        self._place = place
        self._rows = rows

    def wait(self) -> NDArray[np.int32]:
        return self._ring.take(self._place, self._rows)
