"""A plan that was made ahead of masks: until when its draw waits for them, and who draws without. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tercet.engine.slot_arrays import SlotArrays


@dataclass(frozen=True)
class Undrawn:
    """Its rows are computed meanwhile."""

    step_id: int
    slots: NDArray[np.int32]
    """Of each row."""
    awaited: NDArray[np.intp]
    """Rows whose mask was not there."""
    planned_at: float
    num_in_flight: int
    """Plans, itself included."""

    def due(self, step: float, delay: float, *, together: bool) -> float:
        """When it goes with what is there, if steps take `step` seconds and masks `delay`: no sooner than the device
        has computed its rows. `together`: all wait for masks, and nobody else is kept waiting."""
        return self.planned_at + max(self.num_in_flight * step, delay * (2 if together else 1))

    def lacking(self, arrays: SlotArrays) -> NDArray[np.int32]:
        """Slots whose mask may still come."""
        slots = self.slots[self.awaited]
        return slots[arrays.lacks_mask[slots] & arrays.alive[slots]]

    def split(self, arrays: SlotArrays) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Slots whose mask has come; rows that draw without, since it is late or their request is gone."""
        slots = self.slots[self.awaited]
        here = arrays.alive[slots] & ~arrays.lacks_mask[slots]
        return slots[here], self.awaited[~here].astype(np.int32)
