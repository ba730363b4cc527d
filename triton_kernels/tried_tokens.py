"""Which tokens of a step with guesses are of one slot, whatever rows attention takes them for.

Where guesses come from, `guess.py` or a layer, and which of them hold, `accept.py`, is others' matter.

Shape suffixes: T tokens of the step.
"""

from typing import NamedTuple

from torch import Tensor

from tercet.triton_kernels.checks import check_indices


class TriedTokens(NamedTuple):
    """As many of each slot, behind each other: its newest token, and guesses."""

    slots_T: Tensor
    lengths_T: Tensor
    """Tokens of the slot up to this one; 0 where nothing is tried, which is behind what is."""
    each: int

    def counts(self) -> list[tuple[int, int, int]]:
        """Of each slot that tries any, for references: the slot, its first token's row, and how many it tries."""
        firsts = range(0, len(self.slots_T), self.each)
        slots, counts = self.slots_T[:: self.each].tolist(), (self.lengths_T.view(-1, self.each) > 0).sum(1).tolist()
        return [one for one in zip(slots, firsts, counts, strict=True) if one[2]]


def check_tried(tried: TriedTokens, like: Tensor, num_tokens: int | None = None) -> int:
    """How many slots there are; or raise."""
    check_indices("slots", tried.slots_T, like, num_tokens)
    T = tried.slots_T.shape[0]
    check_indices("lengths", tried.lengths_T, like, T)
    if tried.each < 1 or T % tried.each:
        raise ValueError(f"slots: got {T} tokens, wanted {tried.each} of each slot")
    return T // tried.each
