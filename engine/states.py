"""States that layers carry from token to token, where models have some: where copies are made, and who begins from one.

A state lies in the workers, one a slot. It holds all tokens up to the last one computed and cannot be cut back, so a
prompt can begin only where a copy was made: at the end of a chunk, before the slot's next one. Pure; who is admitted,
and what chunks are computed, is decided elsewhere.
"""

import math
from collections.abc import Callable, Sequence

from tercet.engine.kept_states import KeptStates
from tercet.engine.plan_draft import PlanDraft
from tercet.engine.planner_settings import PlannerSettings
from tercet.engine.state_swaps import StateSwaps

_FAR = 512
"""Tokens, to compute which takes longer than a step more."""


class States:
    """Of all slots, and those that are kept."""

    def __init__(self, settings: PlannerSettings) -> None:
        self.tile = settings.state_tile
        """Chunks begin at multiples of it; 0: the model carries no state."""
        self._are_kept = settings.kept_states > 0
        self._page_size = settings.page_size
        self._stride = math.lcm(settings.page_size, max(self.tile, 1))
        """A chunk and a page end at its multiples: there states are kept."""
        self._kept = KeptStates(settings.max_num_seqs + 1, settings.kept_states)  # slots and padding have the first
        self.swaps = StateSwaps(settings.num_host_states, self._kept)
        """Of those that are kept, beside plans."""
        self._reached: dict[int, bytes] = {}
        """Slots whose state is to be kept as the last plan leaves it, and the prefix that it is of."""

    def longest(self, hashes: Sequence[bytes], num_cached: int, is_had: Callable[[bytes], bool] | None = None) -> int:
        """Tokens behind which a state is kept, or `is_had`, of a prefix whose pages hold `num_cached`."""
        is_had = is_had or self._kept.__contains__
        if self._are_kept:
            for num_tokens in range(num_cached // self._stride * self._stride, 0, -self._stride):
                if is_had(hashes[num_tokens // self._page_size]):
                    return num_tokens
        return 0

    def span(self, hashes: Sequence[bytes], num_cached: int, num_there: int) -> tuple[int, int]:
        """Pages behind which a state is kept, of `num_cached`; and those behind which one could be, of as many as are
        cached or on the host."""
        size = self._page_size
        end = self.longest(hashes, num_there * size, self.swaps.could_have)
        return self.longest(hashes, num_cached * size) // size, end // size

    def cuts(self, num_tokens: int, begin: int, num_cached: int) -> list[int]:
        """Where chunks of a prompt of `num_tokens` that is computed from `begin` on shall end, for a state to be kept.

        The last place serves whoever goes on from this prompt. And if others had the first `num_cached` tokens but left
        no state so far, they part there, and more may come: unless a state is kept just ahead of that, as in each turn
        of a chat, where what others had is the answer to the last.
        """
        if not self._are_kept:
            return []
        parting, last = (most // self._stride * self._stride for most in (num_cached, num_tokens - 1))
        ends = {last} if begin and parting - begin < _FAR else {parting, last}
        return sorted(end for end in ends if end > begin)

    def reach(self, slot: int, prefix: bytes) -> None:
        """The plan just made computes this slot up to a cut. Its next chunk comes later."""
        self._reached[slot] = prefix

    def forget(self, slot: int) -> None:
        """Its request is gone: its pages may be, too, by the time that anybody could begin from there."""
        self._reached.pop(slot, None)

    def keep(self, draft: PlanDraft) -> None:
        """The plan in the making copies what the last one left."""
        slot_of = {prefix: slot for slot, prefix in self._reached.items()}
        given = self._kept.keep(slot_of)
        draft.kept += [(slot_of[prefix], place) for prefix, place in given.items()]
        self.swaps.copied(given)
        self._reached.clear()

    def restore(self, prefix: bytes, slot: int, draft: PlanDraft) -> None:
        """A request begins from a state that is kept."""
        place = self._kept.use(prefix)
        draft.restored.append((place, slot))
        self.swaps.used(prefix, place)
