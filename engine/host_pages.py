"""The second level of the prefix cache: which place in the host's memory holds a copy of which page. Pure.

Pages are known by the hashes that `pages.py` makes. A place is free; or on its way to hold a page, and serves nobody
yet; or it holds one, and goes to another when it was the least recently used, unless it is being read.
States have places of their own, which are given to them alike.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence


class HostPages:
    """`count` places, numbered from 0."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        """Of pages that are there, least recently used first."""
        self._coming: dict[bytes, int] = {}
        self._read: Counter[bytes] = Counter()
        """By how many."""

    def __contains__(self, page_hash: bytes) -> bool:
        """Whether it need not be stored."""
        return page_hash in self._place_of or page_hash in self._coming

    def holds(self, page_hash: bytes) -> bool:
        """Whether it could be read now."""
        return page_hash in self._place_of

    def store(self, page_hash: bytes) -> int | None:
        """A place for a page that is not there, until `stored`; None where all others are being written or read."""
        assert page_hash not in self
        if not self._free:
            oldest = next((one for one in self._place_of if one not in self._read), None)
            if oldest is None:
                return None
            self._free.append(self._place_of.pop(oldest))
        place = self._coming[page_hash] = self._free.pop()
        return place

    def stored(self, hashes: Sequence[bytes]) -> None:
        """These are there. A prefix's last page is forgotten first: without it the others still serve."""
        for page_hash in reversed(hashes):
            self._place_of[page_hash] = self._coming.pop(page_hash)

    def read(self, page_hash: bytes) -> int:
        """Where it is, and stays until `was_read`."""
        self._read[page_hash] += 1
        return self._place_of[page_hash]

    def was_read(self, hashes: Sequence[bytes]) -> None:
        """One reader has done with these."""
        for page_hash in hashes:
            self._read[page_hash] -= 1
            if not self._read[page_hash]:
                del self._read[page_hash]

    def use(self, hashes: Sequence[bytes]) -> None:
        """Somebody had these pages of a prefix, wherever they were."""
        for page_hash in reversed(hashes):
            if page_hash in self._place_of:
                self._place_of.move_to_end(page_hash)
