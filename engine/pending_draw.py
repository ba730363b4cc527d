"""The draw of a plan that was made ahead of masks: whose have come, and until when it waits for the others. Pure."""

import numpy as np
from numpy.typing import NDArray

from tercet.engine.constraints import Constraints
from tercet.engine.lease import Lease
from tercet.engine.slot_arrays import SlotArrays
from tercet.ipc.step_messages import Draw, Step

_MANY = 8
"""Masks that take a worker as long as a message does."""


class PendingDraw:
    """Of the plan that was made last, if it awaits masks. Its rows are computed meanwhile."""

    def __init__(self, arrays: SlotArrays, constraints: Constraints, lease: Lease) -> None:
        self._arrays = arrays
        self._constraints = constraints
        self._lease = lease
        self._step: Step | None = None
        self._slots = np.zeros(0, np.int32)
        """Of each row."""
        self._awaited = np.zeros(0, np.int32)
        """Rows whose mask workers do not have yet."""
        self._begun_at = 0.0

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self._step is not None

    def begin(self, step: Step, slots: NDArray[np.int32], awaits: NDArray[np.bool_]) -> None:
        """A plan is made. `slots`: of its rows; `awaits`: of decodes, which come first."""
        if step.awaits:
            self._step, self._slots, self._awaited = step, slots, np.flatnonzero(awaits).astype(np.int32)

    def computing(self, now: float) -> None:
        """The device computes the last plan from now on, if there is one."""
        self._begun_at = now

    def due(self, *, prompts_come: bool) -> float:
        """When it goes with the masks that are there: about when its rows are computed, or later, where nobody but
        those that lack one is kept waiting."""
        times = 2 if self._arrays.all_constrained and not prompts_come else 1
        return self._begun_at + max(self._lease.step_seconds, times * self._constraints.delay)

    def take(self, now: float, *, prompts_come: bool) -> Draw | None:
        """It, once all masks are there, or are waited for no longer; before that, many that are there already."""
        if (step := self._step) is None:
            return None
        slots = self._slots[self._awaited]
        alive, lacking = self._arrays.alive[slots], self._arrays.lacks_mask[slots]
        here, late, without = slots[alive & ~lacking], slots[alive & lacking], self._awaited[~alive | lacking]
        if waits := len(late) > 0 and now < self.due(prompts_come=prompts_come):
            if len(here) < _MANY:
                return None
            self._awaited = without
        else:
            self._step = None
            if len(late):
                self._constraints.note_delay(now, all_there=False)
                self._arrays.draw_again(late)
        masks = self._constraints.masks(self._arrays, here)
        return Draw(step.step_id, step.epoch, *masks, b"" if waits else without.tobytes(), waits)
