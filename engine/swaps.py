"""Pages on their way between the device's cache and the host's memory: which are stored, and who waits for which. Pure.

A page is stored once it is full, and the step that filled it complete; so those that leave the cache later are there
already. A request whose prefix goes on in the host's memory has those pages loaded ahead of its turn: they become
cached pages like any others, and it is admitted as if they had never left. What is copied is held meanwhile, as by a
request, so it is given to nobody; once it is copied it is not: who waits for pages keeps none from those that run.

Where a model carries states, pages serve up to one that is kept. So a request has those pages loaded that are ahead of
the last state that is kept or on the host, and that state, too; or what of both is missing.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tercet.engine.counters import Counters
from tercet.engine.host_pages import HostPages
from tercet.engine.pages import PagePool
from tercet.engine.request import Request
from tercet.engine.state_swaps import StateCopies
from tercet.engine.states import States
from tercet.ipc.swap_messages import Swap

LEAST_LOADED = 2
"""Pages: what serves no more is computed sooner than it has come."""
MOST_STORED = 32
"""Pages stored by one swap, behind which loads wait: a few milliseconds' worth."""


@dataclass
class _Copies:
    """Those of one swap."""

    pages: list[int]
    """All that it holds; those that are copied are the last."""
    hashes: list[bytes]
    """Of those."""
    pairs: bytes
    are_loads: bool
    states: StateCopies = field(default_factory=StateCopies)
    served: Sequence[bytes] = ()
    """Pages that serve behind a load, and did not before it."""
    behind: int | None = -1
    """The plan that has to be complete; None until it is known which is the last that names what is written over."""
    waiting: list[Request] = field(default_factory=list)

    def swap(self, number: int, epoch: int, completed: int) -> Swap:
        """As workers are told of it."""
        both = self.pairs, _packed(self.states.pairs)
        if self.are_loads:
            return Swap(number, epoch, completed, loads=both[0], loaded_states=both[1])
        return Swap(number, epoch, completed, stores=both[0], stored_states=both[1])


class Swaps:
    """All of a replica's. Workers make them in their order."""

    def __init__(self, num_places: int, pool: PagePool, states: States, counters: Counters) -> None:
        self._pool = pool
        self._states = states
        self._counters = counters
        self._host = HostPages(num_places)
        self._full: list[tuple[int, bytes]] = []
        """Pages, by a plan that is made or in the making, and their hashes."""
        self._unstored: deque[tuple[int, int, bytes]] = deque()
        """The plan that has to be complete, page, hash."""
        self._begun: deque[_Copies] = deque()
        """Loads that no swap has told of."""
        self._in_flight: deque[_Copies] = deque()
        self._coming: dict[bytes, _Copies] = {}
        """Pages that are being loaded."""
        self._coming_states: dict[bytes, _Copies] = {}
        self._waiting: dict[Request, int] = {}
        """Those for whom something is being loaded, and the pages that each will need besides."""
        self.completed = 0
        """The last swap that is."""

    @property
    def promised(self) -> tuple[int, int]:
        """Slots and pages that are to be left to those who wait."""
        return len(self._waiting), sum(self._waiting.values())

    @property
    def num_coming_pages(self) -> int:
        """Pages that will be available once all that is begun is complete."""
        return sum(self._pool.num_given_back(copies.pages) for copies in (*self._begun, *self._in_flight))

    # ---------------------------------------------------------------------------------------- requests

    def remembered(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """These are full, by plans made so far or the one in the making, or were cached."""
        self._host.use(hashes)
        for page, page_hash in zip(pages, hashes, strict=True):
            if page_hash not in self._host:
                self._full.append((page, page_hash))

    def is_waiting(self, request: Request) -> bool:
        """Whether pages, or a state, that it waits for are being loaded."""
        return request in self._waiting

    def load(self, request: Request, cached: Sequence[int], hashes: Sequence[bytes], num_pages: int) -> bool:
        """Load what the host has of its prefix, of which `cached` are there; whether it is worth waiting for. `hashes`:
        of all pages that could serve it.

        There is a slot for it, and room for all `num_pages` that it needs: these are left to it. Each request has this
        once, and then computes what has left the cache again: else one could wait for ever, while others enter.
        """
        begin = end = len(cached)
        while end < len(hashes) and (hashes[end] in self._coming or self._host.holds(hashes[end])):
            end += 1
        prefix = None
        if self._states.tile:
            begin, end = self._states.span(request.hashes, begin, end)
            prefix = hashes[end - 1] if end > begin else None
        missing = hashes[len(cached) : end]
        others = next((self._coming[one] for one in missing if one in self._coming), None)
        if prefix is not None:
            others = others or self._coming_states.get(prefix)
        if others is not None:
            self._wait(request, others, 0)
            return True
        request.has_looked = True
        if end - begin < LEAST_LOADED:
            return False
        self._pool.hold(cached[:end])
        pages = self._pool.take(len(missing))
        pairs = _packed(zip(map(self._host.read, missing), pages, strict=True))
        copies = _Copies([*cached[:end], *pages], list(missing), pairs, are_loads=True, served=hashes[begin:end])
        self._coming |= dict.fromkeys(missing, copies)
        if prefix is not None:
            copies.states = self._states.swaps.load(prefix)
            if copies.states.pairs:  # plans that are made, or the one in the making, may name the place
                self._coming_states[prefix], copies.behind = copies, None
        self._begun.append(copies)
        self._wait(request, copies, num_pages - len(copies.pages))
        return True

    def _wait(self, request: Request, copies: _Copies, num_promised: int) -> None:
        self._waiting[request] = num_promised
        copies.waiting.append(request)

    # ------------------------------------------------------------------------------------------- swaps

    def take(self, planned: int, completed: int, epoch: int) -> Swap | None:
        """The next one, if there is any: the loads of one request, or else what is to be stored, once the last is.

        Plan `planned` is the last that was made, `completed` the last that is complete.
        """
        self._unstored += ((planned, page, page_hash) for page, page_hash in self._full)
        self._full.clear()
        self._states.swaps.planned(planned)
        for copies in self._begun:
            if copies.behind is None:
                copies.behind = planned
        if self._begun:
            if (behind := self._begun[0].behind) is None or behind > completed:
                return None
            copies = self._begun.popleft()
        elif not all(one.are_loads for one in self._in_flight) or (stores := self._stores(completed)) is None:
            return None
        else:
            copies = stores
        self._in_flight.append(copies)
        return copies.swap(self.completed + len(self._in_flight), epoch, completed)

    def _stores(self, completed: int) -> _Copies | None:
        pages, places, hashes = list[int](), list[int](), list[bytes]()
        while len(pages) < MOST_STORED and self._unstored and self._unstored[0][0] <= completed:
            _, page, page_hash = self._unstored.popleft()
            # By now it may belong to somebody else, or the host may have got it from another.
            if self._pool.find([page_hash]) != [page] or page_hash in self._host:
                continue
            if (place := self._host.store(page_hash)) is not None:
                pages.append(page)
                places.append(place)
                hashes.append(page_hash)
        states = self._states.swaps.stores(completed)
        if not pages and not states.pairs:
            return None
        self._pool.hold(pages)
        return _Copies(pages, hashes, _packed(zip(pages, places, strict=True)), are_loads=False, states=states)

    def complete(self, number: int) -> list[Request]:
        """The copies are made. Returns those that need wait no longer."""
        self.completed += 1
        assert number == self.completed, f"swap {number} is complete; {self.completed} is due"
        copies = self._in_flight.popleft()
        count, num_states = len(copies.hashes), len(copies.states.pairs)
        if copies.are_loads:
            for page, page_hash in zip(copies.pages[len(copies.pages) - count :], copies.hashes, strict=True):
                self._pool.remember(page, page_hash)
                del self._coming[page_hash]
            self._host.was_read(copies.hashes)
            self._states.swaps.loaded(copies.states)
            for prefix in copies.states.prefixes:
                self._coming_states.pop(prefix, None)
            self._counters.loaded += count
            self._counters.loaded_states += num_states
        else:
            self._host.stored(copies.hashes)
            self._states.swaps.stored(copies.states)
            self._counters.stored += count
            self._counters.stored_states += num_states
        self._pool.give_back(copies.pages)
        served = set(copies.served)
        for request in copies.waiting:
            del self._waiting[request]
            request.num_loaded = sum(page_hash in served for page_hash in request.hashes)
        return copies.waiting


def _packed(pairs: Iterable[tuple[int, int]]) -> bytes:
    return array("i", (number for pair in pairs for number in pair)).tobytes()
