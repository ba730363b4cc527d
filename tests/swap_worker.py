"""The simulated worker with pages in the host's memory: what comes back is the very prefix that it is taken for.

Copies are made by a stream of its own, which is told to the scheduler when rank 0 has made them. This is any rank: one
that copies at once, or as late as the protocol lets it, when a step comes that is behind.
"""

from collections import Counter, deque
from typing import Any

import numpy as np

from simulated_worker import SimulatedWorker
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Sampled, Step
from tercet.ipc.swap_messages import Swap, Swapped
from test_engine_planner import Run

Page = list[bytes | None]


class SwapWorker(SimulatedWorker):
    """`lags`: it makes copies when they cannot wait any longer."""

    def __init__(self, chosen: PlannerSettings, *, lags: bool) -> None:
        super().__init__(chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens)
        self.counts: Counter[str] = Counter()
        self._begin_copies(chosen, lags=lags)

    def _begin_copies(self, chosen: PlannerSettings, *, lags: bool) -> None:
        self._num_places, self._lags = chosen.num_host_pages, lags
        self._last_executed = -1
        self._host: dict[int, Page] = {}
        self._untold: deque[Swap] = deque()
        self._uncopied: deque[tuple[Swap, dict[int, Page]]] = deque()
        """With what is in the pages that it stores."""
        self.num_swaps = 0

    @property
    def swaps(self) -> bool:
        """Whether some have not been told of."""
        return bool(self._untold)

    def take_swap(self, swap: Swap) -> None:
        """Take one, and check it against all that is still to be done."""
        self.num_swaps += 1
        assert swap.number == self.num_swaps
        assert swap.completed <= self._last_executed, "a step is said to be complete"
        stores, loads = pairs(swap.stores), pairs(swap.loads)
        assert bool(swap.stores + swap.stored_states) != bool(swap.loads + swap.loaded_states)
        from_pages, to_places = {page for page, _ in stores}, {place for _, place in stores}
        from_places, to_pages = {place for place, _ in loads}, {page for _, page in loads}
        assert len(from_pages) == len(to_places) == len(stores)
        assert len(to_pages) == len(loads)
        assert 0 not in from_pages | to_pages
        assert all(0 <= place < self._num_places for place in to_places | from_places)
        for other in self._untold:
            written = {place for _, place in pairs(other.stores)}
            assert not written & (from_places | to_places), "a place is read or written while it is written"
            assert not to_places & {place for place, _ in pairs(other.loads)}, "a place is written while it is read"
            named = {page for page, _ in pairs(other.stores)} | {page for _, page in pairs(other.loads)}
            assert not named & (from_pages | to_pages), "a page is copied twice at a time"
        assert not any(to_pages & read for read in self._read), "a page of a plan in flight is loaded over"
        content = {page: self._page(page) for page in from_pages}
        if not self._lags or swap.completed >= self._last_executed:  # else it has yet to be written there
            assert all(None not in page for page in content.values()), "a page is stored that is not full"
        self._untold.append(swap)
        self._uncopied.append((swap, content))
        if not self._lags:
            self._copy(swap.number)
        self.counts.update(stored=len(stores), loaded=len(loads), swaps=1)

    def tell(self) -> int:
        """The oldest is made, on rank 0."""
        return self._untold.popleft().number

    def issue(self, step: Step) -> None:
        assert step.swapped == self.num_swaps - len(self._untold)
        super().issue(step)
        loading = {page for swap in self._untold for _, page in pairs(swap.loads)}
        assert not loading & self._read[-1], "a page is named while it is loaded"

    def execute(self) -> Sampled:
        step, index = self._queue[0]
        self._copy(step.swapped)
        sampled = super().execute()
        if index == step.count - 1:
            self._last_executed = step.step_id
        return sampled

    def _copy(self, last: int) -> None:
        """Make all up to this one."""
        while self._uncopied and self._uncopied[0][0].number <= last:
            swap, content = self._uncopied.popleft()
            for page, place in pairs(swap.stores):
                assert self._page(page) == content[page], "a page changed before it was copied"
                self._host[place] = content[page]
            for place, page in pairs(swap.loads):
                for offset, cell in enumerate(self._host[place]):
                    assert cell is not None
                    self._cache[page, offset] = cell

    def _page(self, page: int) -> Page:
        return [self._cache.get((page, offset)) for offset in range(self._page_size)]


class SwapRun(Run):
    """A run with pages in the host's memory. Of a class of runs with masks: beside that one."""

    worker: SwapWorker

    def __init__(self, chosen: PlannerSettings, *, lags: bool = False) -> None:
        super().__init__(chosen)
        self.lags = lags
        self.begin_worker()

    def begin_worker(self) -> None:
        self.worker = SwapWorker(self.settings, lags=self.lags)

    def swap(self) -> bool:
        swap = self.planner.swap()
        if swap is not None:
            self.worker.take_swap(swap)
        return swap is not None

    def tell(self) -> None:
        self.planner.swapped(Swapped(self.worker.tell(), self.planner.epoch))

    def draw(self, **_: Any) -> bool:
        return False

    def finish(self) -> None:
        """All that is asked, and all that is to be stored."""
        while True:
            if self.swap():
                continue
            if self.worker.swaps:
                self.tell()
                continue
            if self.planner.idle:
                break
            went_on = self.draw() or self.plan()
            if self.worker.can_execute:
                self.execute()
            else:
                assert went_on or self.answer() == []
        assert self.planner.load().num_free_pages == self.settings.num_pages - 1

    def answer(self, index: int = 0, failure: str | None = None) -> list[int]:
        raise AssertionError("nothing goes on")


def pairs(packed: bytes) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in np.frombuffer(packed, np.int32).reshape(-1, 2).tolist()]
