"""One plan in the making: what it changes; and what is kept in mind of one that was made. Knows no policy."""

import itertools
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tercet.ipc.step_messages import Enter, Step


@dataclass
class PlanDraft:
    """Mutable, and gone once the plan is made."""

    enters: list[Enter] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    """Row of the page tables, index in it, page."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Page, and page that becomes its copy."""
    kept: list[tuple[int, int]] = field(default_factory=list)
    """Slot, and place that gets a copy of its state."""
    restored: list[tuple[int, int]] = field(default_factory=list)
    """Place, and slot that gets a copy of the state there."""
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """Slot, first position, length."""

    def drop_pages(self, unwanted: Callable[[int], bool]) -> None:
        """Of these rows: whoever has them was preempted after it had got some."""
        self.pages = [triple for triple in self.pages if not unwanted(triple[0])]

    @property
    def chunk_slots(self) -> NDArray[np.int32]:
        return np.array([slot for slot, _, _ in self.chunks], np.int32)

    def to_step(
        self,
        step_id: int,
        count: int,
        left: list[int],
        decodes: NDArray[np.int32],
        epoch: int,
        masks: tuple[bytes, str],
        longest: int,
        awaits: bool,
        num_guesses: int,
        swapped: int,
    ) -> Step:
        return Step(
            step_id,
            count,
            array("i", left).tobytes(),
            tuple(self.enters),
            _packed(self.pages),
            _packed(self.chunks),
            decodes.tobytes(),
            epoch,
            *masks,
            _packed(self.copies),
            longest,
            awaits,
            num_guesses,
            _packed(self.kept),
            _packed(self.restored),
            swapped,
        )


def _packed(records: Iterable[tuple[int, ...]]) -> bytes:
    return array("i", itertools.chain.from_iterable(records)).tobytes()


@dataclass(frozen=True)
class InFlight:
    """A plan whose results are not all there yet."""

    step_id: int
    count: int
    slots: NDArray[np.int32]
    """Slot of each row: of decodes that try several tokens, so many times."""
    is_decode: bool
    width: int
    """Rows of a slot."""

    @classmethod
    def of(cls, step: Step, slots: NDArray[np.int32]) -> "InFlight":
        """`slots`: those of decodes, and of chunks."""
        width = 1 + step.num_guesses
        return cls(step.step_id, step.count, np.repeat(slots, width), not step.chunks, width)
