"""What the planner knows of each slot, in arrays over slots, so that a step of many rows costs a few array operations.

Numbers only: it knows no pages and no plans.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tercet.engine.request import Request

_MAX_STOP_IDS = 8
_MOST_LATE = 2
"""Draws that may wait for the same mask: then its row is planned once it is there, and not before."""

Slots = NDArray[np.int32]


class Sampled(NamedTuple):
    """Tokens of a step."""

    rows: NDArray[np.intp]
    """Whose they are, of those requests that are still there."""
    slots: Slots
    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    """Of slots, each with its token."""


class SlotArrays:
    """Mutable, and owned by the planner. `alive`: a request holds the slot; `decoding`: its prompt is planned."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.tokens = np.empty((num_slots, max_model_len), np.int32)
        self.known = np.zeros(num_slots, np.int32)
        """Tokens of the request so far."""
        self.planned = np.zeros(num_slots, np.int32)
        """Tokens whose keys and values are computed by plans made so far."""
        self.capacity = np.zeros(num_slots, np.int32)
        """Tokens that its pages hold."""
        self.told = np.zeros(num_slots, np.int32)
        """Tokens of the request that are out already."""
        self.number = np.zeros(num_slots, np.int64)
        self.alive = np.zeros(num_slots, bool)
        self.constrained = np.zeros(num_slots, bool)
        """What may come next depends on the last token: its next step is planned once that is known."""
        self.lacks_mask = np.zeros(num_slots, bool)
        """Constrained, and what may come next is not known yet."""
        self.asked_at = np.zeros(num_slots)
        """When that became known."""
        self.times_late = np.zeros(num_slots, np.int32)
        """Draws that have gone without that mask."""
        self.decoding = np.zeros(num_slots, bool)
        self.coming = np.zeros(num_slots, np.int32)
        """Tokens that plans in flight sample at most."""
        self._max_length = np.zeros(num_slots, np.int32)
        self._num_brought = np.zeros(num_slots, np.int32)
        """Tokens with which the request came: its prompt, and what it may have had before."""
        self._stop_ids = np.full((num_slots, _MAX_STOP_IDS), -1, np.int32)

    def enter(self, request: Request, num_cached: int) -> None:
        """A request takes its slot; keys and values of its first `num_cached` tokens are there."""
        slot, length = request.slot, len(request.token_ids)
        stop_ids = np.frombuffer(request.sampling.stop_ids, np.int32)
        self.tokens[slot, :length] = request.token_ids
        self.known[slot], self.planned[slot], self.capacity[slot] = length, num_cached, 0
        self.told[slot] = request.num_prompt + request.num_told
        self._max_length[slot], self._num_brought[slot] = request.max_length, length
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
        self.constrained[slot], self.lacks_mask[slot] = request.sampling.grammar is not None, False
        self.number[slot], self.alive[slot] = request.number, True

    def leave(self, slot: int) -> None:
        self.alive[slot] = self.decoding[slot] = False

    def that_decode(self, *, ahead: bool) -> Slots:
        """Slots with a token to sample that no plan has asked for; `ahead` of their masks, too."""
        hopeless = self.lacks_mask & (self.times_late >= _MOST_LATE)
        unready = hopeless if ahead else self.awaits_mask(slice(None))
        ready = ~(self.constrained & unready)
        return np.flatnonzero(self.decoding & ready & (self.planned < self._max_length - 1)).astype(np.int32)

    @property
    def any_constrained(self) -> bool:
        """Whether a long lease would keep some slot from its next step, which waits for its last token."""
        return bool((self.constrained & self.decoding).any())

    @property
    def all_constrained(self) -> bool:
        """Of those that decode."""
        return not (self.decoding & ~self.constrained).any()

    def awaits_mask(self, slots: Slots | slice) -> NDArray[np.bool_]:
        """Of slots that decode, whose mask is still to come for a step that is planned now: it is computed, or follows
        from a token of a plan in flight."""
        awaits: NDArray[np.bool_] = self.lacks_mask[slots] | (self.planned[slots] >= self.known[slots])
        return self.constrained[slots] & awaits

    def draw_again(self, slots: Slots) -> None:
        """These were planned ahead of their masks, and drew nothing."""
        self.planned[slots] -= 1
        self.times_late[slots] += 1

    def longest_lease(self, slots: Slots) -> int:
        """Steps after which none of these has anything left to sample."""
        return int((self._max_length[slots] - 1 - self.planned[slots]).max())

    def longest(self, slots: Slots) -> int:
        """Tokens of the longest of these with the one that it decodes next; 0 for none."""
        return int(self.planned[slots].max(initial=-1)) + 1

    def planned_after(self, slots: Slots, count: int) -> NDArray[np.int32]:
        """`planned` once these have decoded `count` steps; the last token's keys and values are never wanted."""
        return np.minimum(self.planned[slots] + count, self._max_length[slots] - 1)

    def plan(self, decodes: Slots, slots: Slots, num_tokens: int) -> None:
        """A plan decodes so many tokens of some of `slots`, and computes parts of prompts of the others."""
        self.planned[decodes] = self.planned_after(decodes, num_tokens)
        self.coming[slots] += num_tokens

    def growth(self, slots: Slots, count: int) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
        """`planned_after` so many steps, and for which of these slots that is more than their pages hold."""
        wanted = self.planned_after(slots, count)
        return wanted, np.flatnonzero(wanted > self.capacity[slots])

    def take(self, slots: Slots, width: int, token_ids: NDArray[np.int32]) -> Sampled:
        """What a step has sampled for these rows, `width` of each slot behind each other; -1 or less where nothing."""
        self.coming[slots[::width]] -= width
        rows = np.flatnonzero((token_ids >= 0) & self.alive[slots])
        slots, token_ids = slots[rows], token_ids[rows]
        lengths = self.known[slots] + 1
        if width > 1:
            lengths += (rows % width).astype(np.int32)  # those of a slot that count are its first
        self.tokens[slots, lengths - 1] = token_ids
        self.known[slots] = lengths  # in order: the last of a slot stays
        if width > 1:  # not all that was tried was right: less is planned than could have been
            self.planned[slots] = np.minimum(lengths - 1 + self.coming[slots], self._max_length[slots] - 1)
        return Sampled(rows, slots, token_ids, lengths)

    def that_may_end(self, slots: Slots, lengths: NDArray[np.int32], token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Rows that are full, or whose token is a stop id (which min_tokens may still overrule)."""
        stops = (self._stop_ids[slots] == token_ids[:, None]).any(1)
        may_end: NDArray[np.bool_] = (lengths >= self._max_length[slots]) | stops
        return may_end

    def that_begin(self, slots: Slots, lengths: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Rows whose newest token is the first in their slot."""
        begin: NDArray[np.bool_] = lengths == self._num_brought[slots] + 1
        return begin
