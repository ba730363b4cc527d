"""Requests with a grammar among those that run: what they may sample next goes into the plans.

Between the planner, which knows slots, and `Grammars`, which knows token ids. Without such requests it does nothing.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tercet.engine.grammars import Grammars
from tercet.engine.request import Request
from tercet.engine.slot_arrays import SlotArrays
from tercet.ipc.step_messages import Mask


class Constraints:
    """Of one set of slots."""

    def __init__(self, slots: SlotArrays, grammars: Callable[[], Grammars], vocab_size: int) -> None:
        """`grammars`: makes them, when the first request comes that has one."""
        self._slots = slots
        self._make_grammars = grammars
        self._vocab_size = vocab_size
        self._grammars: Grammars | None = None

    def begin(self, request: Request) -> None:
        """It takes a slot."""
        if request.sampling.grammar is None:
            return
        if self._grammars is None:
            self._grammars = self._make_grammars()
        generated = request.token_ids[request.num_prompt :].tolist()
        self._grammars.start(request.number, request.sampling.grammar, generated)

    def end(self, request: Request) -> None:
        """It leaves its slot."""
        if self._grammars is not None:
            self._grammars.drop(request.number)

    def accept(self, slots: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """What these slots sampled."""
        if self._grammars is None:
            return
        for row in np.flatnonzero(self._slots.constrained[slots]).tolist():
            self._grammars.accept(int(self._slots.number[slots[row]]), int(token_ids[row]))

    @property
    def any_waits(self) -> bool:
        """Whether a long lease would keep some slot from its next step, which waits for its last token."""
        return self._grammars is not None and bool((self._slots.constrained & self._slots.decoding).any())

    def masks(self, decodes: NDArray[np.int32], chunks: list[tuple[int, int, int]]) -> tuple[Mask, ...]:
        """For every slot with a grammar that samples in a plan of these rows."""
        if self._grammars is None:
            return ()
        slots = [*decodes.tolist(), *(slot for slot, _, _ in chunks if self._slots.decoding[slot])]
        return tuple(
            Mask(slot, self._grammars.mask(int(self._slots.number[slot]), self._vocab_size))
            for slot in slots
            if self._slots.constrained[slot]
        )
