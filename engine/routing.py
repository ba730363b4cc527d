"""Which replica a new request goes to. Pure: no socket, no clock.

Where most of its prompt has been seen before, there are its keys and values, as far as they are still cached; unless
that replica has clearly more to do than the one with the least: by more than a quarter of what that has and twice what
of the prompt was seen. It knows what was sent where, and is told by whoever asks how much of it is outstanding; what is
cached in fact, and what is computed when, the schedulers know.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence

BLOCK = 64
"""Tokens of which a prefix is seen or not, all together. What is shorter goes where there is the least to do."""
ANSWER_TOKENS = 256
"""A live answer counts as so many tokens of a prompt that has not begun: that many it has yet to say, about."""
_BLOCK_BYTES = 4 * BLOCK
_MOST_BLOCKS = 2**16
"""Remembered, of four million tokens in all; those longest not seen are forgotten."""


class Routing:
    """What each replica has seen, and whose turn it is among equals."""

    def __init__(self, num_replicas: int, *, looks_at_prefixes: bool, most_blocks: int = _MOST_BLOCKS) -> None:
        """`looks_at_prefixes`: schedulers cache them."""
        self._num_replicas = num_replicas
        self._looks_at_prefixes = looks_at_prefixes
        self._most_blocks = most_blocks
        self._seen_by: OrderedDict[int, int] = OrderedDict()
        """By the hash of a prefix, a bit for each replica. Before a prefix the longer ones that begin with it are
        forgotten. Hashes may collide: then a request goes where it finds nothing."""
        self._turn = 0

    def choose(self, prompt_ids: bytes, salt: object, work: Sequence[int], absent: Container[int] = ()) -> int:
        """A replica for this prompt (int32), of the others than `absent` if there are any.

        `salt`: prefixes of two that differ in it have nothing in common. `work`: tokens outstanding with each replica.
        """
        eligible = [one for one in range(self._num_replicas) if one not in absent] or list(range(self._num_replicas))
        hashes = self._hashes(prompt_ids, salt) if self._looks_at_prefixes else []
        least = self._least_busy(eligible, work)
        familiar, num_seen = self._longest_seen(hashes, eligible)
        chosen = least
        if familiar:
            best = self._least_busy(familiar, work)
            # What need not be computed is worth some waiting; of a replica that has much, more is soon done.
            if work[best] <= work[least] * 5 // 4 + 2 * num_seen * BLOCK:
                chosen = best
        if chosen == least:
            self._turn = (chosen + 1) % self._num_replicas
        self._note(hashes, chosen)
        return chosen

    def forget(self, replica: int) -> None:
        """Its cache is empty."""
        others = ~(1 << replica)
        left = ((key, seen & others) for key, seen in self._seen_by.items())
        self._seen_by = OrderedDict((key, seen) for key, seen in left if seen)

    def _hashes(self, prompt_ids: bytes, salt: object) -> list[int]:
        """Of the prompt's first block, its first two, and so on."""
        hashes, last = [], hash(salt)
        for start in range(0, len(prompt_ids) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            last = hash((last, prompt_ids[start : start + _BLOCK_BYTES]))
            hashes.append(last)
        return hashes

    def _longest_seen(self, hashes: Sequence[int], eligible: Sequence[int]) -> tuple[list[int], int]:
        """Those who have seen the longest beginning of it, and of how many blocks that is."""
        seen, num_blocks = sum(1 << one for one in eligible), 0
        for one in hashes:
            if not (more := seen & self._seen_by.get(one, 0)):
                break
            seen, num_blocks = more, num_blocks + 1
        return [one for one in eligible if seen >> one & 1] if num_blocks else [], num_blocks

    def _least_busy(self, replicas: Sequence[int], work: Sequence[int]) -> int:
        """Among equals, the next one in turn."""
        return min(replicas, key=lambda one: (work[one], (one - self._turn) % self._num_replicas))

    def _note(self, hashes: Sequence[int], replica: int) -> None:
        for one in reversed(hashes):
            self._seen_by[one] = self._seen_by.get(one, 0) | 1 << replica
            self._seen_by.move_to_end(one)
        while len(self._seen_by) > self._most_blocks:
            self._seen_by.popitem(last=False)
