"""The page pool over long random histories: no page leaked, given out twice, or found under a wrong prefix."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tercet.engine.pages import PagePool, PrefixHasher

NUM_PAGES = 12
HASHER = PrefixHasher(b"key", 2)


class PoolHistory(RuleBasedStateMachine):
    """Holders with prefixes over a tiny alphabet, so that prefixes meet often."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders: list[tuple[list[int], list[bytes]]] = []
        self.content: dict[int, bytes] = {}
        """What each page holds, as its last holder wrote it."""

    @rule(pages=st.lists(st.integers(0, 1), max_size=4))
    def enter(self, pages: list[int]) -> None:
        hashes = [HASHER.root("")]
        for page in pages:
            hashes.extend(HASHER.chain(hashes[-1], np.array([page, page], np.int32)))
        hashes = hashes[1:]
        found = self.pool.find(hashes)
        for page, page_hash in zip(found, hashes, strict=False):
            assert self.content[page] == page_hash, "a page is found under a prefix that it does not hold"
        fresh = len(hashes) - len(found)
        if fresh + self.pool.num_kept(found) > self.pool.num_available:
            return
        self.pool.hold(found)
        held = {page for pages_held, _ in self.holders for page in pages_held}
        taken = self.pool.take(fresh)
        assert not held & set(taken), "a held page is given out"
        assert not set(found) & set(taken)
        assert 0 not in taken
        for page, page_hash in zip(taken, hashes[len(found) :], strict=True):
            self.content[page] = page_hash
        self.holders.append((found + taken, hashes))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), share=st.floats(0, 1))
    def remember(self, data: st.DataObject, share: float) -> None:
        pages, hashes = data.draw(st.sampled_from(self.holders))
        for page, page_hash in list(zip(pages, hashes, strict=True))[: round(share * len(pages))]:
            self.pool.remember(page, page_hash)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        pages, _ = self.holders.pop(index)
        self.pool.give_back(pages)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        held = Counter(page for pages, _ in self.holders for page in pages)
        assert self.pool.num_available == NUM_PAGES - 1 - len(held)
        for pages, _ in self.holders:
            assert self.pool.num_given_back(pages) == sum(held[page] == 1 for page in pages)


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_least_recently_used_is_forgotten_first_and_prefixes_from_their_end() -> None:
    pool = PagePool(7)
    hashes = [HASHER.root(str(index)) for index in range(6)]
    first, second = pool.take(3), pool.take(3)
    for page, page_hash in zip(first + second, hashes, strict=True):
        pool.remember(page, page_hash)
    pool.give_back(second)
    pool.give_back(first)
    pool.take(2)
    assert pool.find(hashes[3:]) == second[:1]
    assert pool.find(hashes[:3]) == first
    pool.take(3)
    assert pool.find(hashes[3:]) == []
    assert pool.find(hashes[:3]) == first[:1]


def test_more_than_there_is_and_too_small_a_pool() -> None:
    pool = PagePool(4)
    with pytest.raises(ValueError, match=r"asked for 4 pages; 3 are available"):
        pool.take(4)
    with pytest.raises(ValueError, match=r"got 1 pages; want at least 2"):
        PagePool(1)


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(4, caching=False)
    (page,) = pool.take(1)
    pool.remember(page, b"hash")
    assert pool.find([b"hash"]) == []
    pool.give_back([page])
    assert pool.num_available == 3


def test_hashes_depend_on_key_salt_adapter_order_and_prefix() -> None:
    ids = np.array([1, 2], np.int32)
    roots = {HASHER.root(""), HASHER.root("salt"), HASHER.root("", 0), PrefixHasher(b"other", 2).root("")}
    assert len(roots) == 4
    assert len({one for root in roots for one in HASHER.chain(root, ids)}) == 4
    assert list(HASHER.chain(HASHER.root(""), ids)) != list(HASHER.chain(HASHER.root(""), ids[::-1]))


def test_no_salt_stands_for_an_adapter() -> None:
    salts = ["", "0", "1", "-1", "0:", "1:", "-1:", ":", "0:0", "1:1:", "\0"]
    asked = [(salt, adapter) for salt in salts for adapter in (-1, 0, 1, 10)]
    assert len({HASHER.root(*one) for one in asked}) == len(asked)


def test_chains_are_as_long_as_there_are_full_pages_and_go_on() -> None:
    ids, root = np.arange(7, dtype=np.int32), HASHER.root("")
    first, second, third = HASHER.chain(root, ids)
    assert len({root, first, second, third}) == 4
    assert list(HASHER.chain(first, ids[2:])) == [second, third]
    assert list(HASHER.chain(root, ids[:4])) == [first, second]
    assert list(HASHER.chain(root, ids[:1])) == list(HASHER.chain(root, ids[:0])) == []
    assert list(HASHER.chain(root, ids[2:4])) != [second], "a page's hash is of all that comes before it, too"
