"""The draw of a plan that was made ahead of masks: whose have come, and until when it waits for the others. Pure."""

import numpy as np
from numpy.typing import NDArray

from tercet.engine.constraints import Constraints
from tercet.engine.slot_arrays import SlotArrays
from tercet.ipc.step_messages import Computed, Draw, Step

_MANY = 8
"""Masks that take a worker as long as a message does."""


class PendingDraw:
    """Of the plan that was made last, if it awaits masks. Its rows are computed meanwhile."""

    def __init__(self, arrays: SlotArrays, constraints: Constraints) -> None:
        self._arrays = arrays
        self._constraints = constraints
        self._step: Step | None = None
        self._slots = np.zeros(0, np.int32)
        """Of each row."""
        self._awaited = np.zeros(0, np.int32)
        """Rows whose mask workers do not have yet."""
        self._begun_at = 0.0
        self._computed_at: float | None = None

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self._step is not None

    def begin(self, step: Step, slots: NDArray[np.int32], awaits: NDArray[np.bool_]) -> None:
        """A plan is made. `slots`: of its rows; `awaits`: of decodes, which come first."""
        if step.awaits:
            self._step, self._slots, self._awaited = step, slots, np.flatnonzero(awaits).astype(np.int32)

    def turn_comes(self, now: float) -> None:
        """The device computes the last plan from now on, if there is one."""
        self._begun_at = now

    def computed(self, message: Computed, now: float) -> None:
        """The device has come to a draw, of this plan or of one before."""
        if self._step is not None and self._step.step_id == message.step_id:
            self._computed_at = now

    def due(self, *, prompts_come: bool) -> float | None:
        """When it goes without the masks that are not there, if so.

        Rows that want none do not wait. Among those that do, one that has to do without comes a step later: while the
        others have waited for less than that, all of them counted, they wait. New prompts are one more.
        """
        if self._computed_at is None:
            return None
        num_late = int(self._lacking(self._slots[self._awaited]).sum())
        if not (num_others := len(self._slots) - num_late + prompts_come):
            return None
        seconds = self._computed_at - self._begun_at if self._arrays.all_constrained else 0.0
        return self._computed_at + seconds * num_late / num_others

    def take(self, now: float, *, prompts_come: bool) -> Draw | None:
        """It, once all masks are there, or are waited for no longer; before that, many that are there already."""
        if (step := self._step) is None:
            return None
        slots = self._slots[self._awaited]
        alive, late = self._arrays.alive[slots], self._lacking(slots)
        here, without = slots[alive & ~late], self._awaited[~alive | late]
        if waits := late.any() and ((due := self.due(prompts_come=prompts_come)) is None or now < due):
            if len(here) < _MANY:
                return None
            self._awaited = without
        else:
            self._step = self._computed_at = None
            self._arrays.draw_again(slots[late])
        masks = self._constraints.masks(self._arrays, here)
        return Draw(step.step_id, step.epoch, *masks, b"" if waits else without.tobytes(), bool(waits))

    def _lacking(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Of these, whose mask may still come."""
        lacking: NDArray[np.bool_] = self._arrays.alive[slots] & self._arrays.lacks_mask[slots]
        return lacking
