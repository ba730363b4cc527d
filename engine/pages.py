"""The page pool and the prefix cache: which page of the KV cache belongs to whom, and what it holds.

A page is in one of three states: held by one or more requests; kept, because what it holds may be wanted again; or
free. Pages are kept under the hash of everything up to their last token, so a hit is a whole prefix and not a page.
It knows page numbers and token ids; it knows no request and no step.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_HASH_BYTES = 16


class PagePool:
    """Pages 1..num_pages-1; page 0 is padding's and never given out."""

    def __init__(self, num_pages: int, *, caching: bool = True) -> None:
        if num_pages < 2:
            raise ValueError(f"got {num_pages} pages; want at least 2, since page 0 is never given out")
        self.num_pages = num_pages
        self._caching = caching
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages that nobody holds, least recently used first."""
        self._first_to_go: OrderedDict[int, None] = OrderedDict()
        """Others, that are forgotten before those."""

    @property
    def num_available(self) -> int:
        """Pages that `take` could give: the free ones and the kept ones."""
        return len(self._free) + len(self._kept) + len(self._first_to_go)

    def take(self, count: int) -> list[int]:
        """`count` pages for one holder. Where need be, kept ones are forgotten: those that are to go first, then the
        least recently used."""
        if count > self.num_available:
            raise ValueError(f"asked for {count} pages; {self.num_available} are available")
        while len(self._free) < count:
            page, _ = (self._first_to_go or self._kept).popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def give_back(self, pages: Sequence[int], *, first_to_go: bool = False) -> None:
        """One holder lets go. A prefix's last page is forgotten first: without it the others still serve. Those that
        are `first_to_go` are forgotten before all that are kept already."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is given back and nobody holds it"
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._hash_of:
                    (self._first_to_go if first_to_go else self._kept)[page] = None
                else:
                    self._free.append(page)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._page_of

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest cached prefix. They are not held yet: see `hold`."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder for pages that `find` gave."""
        for page in pages:
            if not self._holders[page]:
                del (self._kept if page in self._kept else self._first_to_go)[page]
            self._holders[page] += 1

    def num_given_back(self, pages: Sequence[int]) -> int:
        """How many more would be available if one holder let go of these."""
        return sum(self._holders[page] == 1 for page in pages)

    def num_kept(self, pages: Sequence[int]) -> int:
        """How many of these nobody holds: holding them makes as many fewer available."""
        return sum(not self._holders[page] for page in pages)

    def remember(self, page: int, page_hash: bytes) -> None:
        """This held page is full and holds what the hash says. The first of several equal pages is remembered."""
        assert self._holders[page] > 0
        if self._caching and page_hash not in self._page_of and page not in self._hash_of:
            self._hash_of[page] = page_hash
            self._page_of[page_hash] = page


class PrefixHasher:
    """Hashes of full pages, each over the one before it. Without the key nobody can make a prompt that collides."""

    def __init__(self, key: bytes, page_size: int) -> None:
        self._keyed = blake2b(key=key, digest_size=_HASH_BYTES)
        self.page_size = page_size

    def root(self, cache_salt: str, adapter: int = -1) -> bytes:
        """What the first page's hash is chained to: requests share pages only under the same salt and adapter, told by
        the number of its load."""
        return self._hash(b"%d:" % adapter + cache_salt.encode())  # a salt begins behind the first colon

    def chain(self, previous: bytes, token_ids: NDArray[np.int32]) -> Iterator[bytes]:
        """The hashes of the full pages of int32 ids, given the hash before them."""
        packed, page_bytes = token_ids.tobytes(), token_ids.itemsize * self.page_size
        for begin in range(0, len(packed) - page_bytes + 1, page_bytes):
            previous = self._hash(previous + packed[begin : begin + page_bytes])
            yield previous

    def _hash(self, content: bytes) -> bytes:
        keyed = self._keyed.copy()  # in less time than it takes to key one
        keyed.update(content)
        return keyed.digest()
