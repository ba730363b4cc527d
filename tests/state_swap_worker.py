"""The simulated worker with states and pages in the host's memory: a state that comes back is of the very tokens that
it is taken for.

As of pages, copies are made at once or as late as can be; no plan that may be executed meanwhile names what they write,
nor writes what they read.
"""

from collections import deque

from state_worker import State, StateWorker
from swap_worker import SwapRun, SwapWorker, pairs
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Step
from tercet.ipc.swap_messages import Swap


class StateSwapWorker(SwapWorker, StateWorker):
    """Both."""

    def __init__(self, chosen: PlannerSettings, *, lags: bool) -> None:
        StateWorker.__init__(self, chosen)
        self._begin_copies(chosen, lags=lags)
        self._num_host_states = chosen.num_host_states
        self._host_states: dict[int, State] = {}
        self._copying: deque[tuple[Swap, dict[int, State]]] = deque()
        """With what is in the places that it stores."""
        self._issued: list[Step] = []

    def issue(self, step: Step) -> None:
        super().issue(step)
        self._issued.append(step)
        for swap in self._untold:
            self._check_beside(swap, step)

    def take_swap(self, swap: Swap) -> None:
        stored, loaded = pairs(swap.stored_states), pairs(swap.loaded_states)
        here = [place for place, _ in stored] + [place for _, place in loaded]
        there = [place for _, place in stored] + [place for place, _ in loaded]
        assert len(set(here)) == len(here)
        assert len(set(there)) == len(there)
        assert all(place in self._places for place in here)
        assert all(0 <= place < self._num_host_states for place in there)
        assert len(loaded) <= 1
        for other in self._untold:
            others = [*pairs(other.stored_states), *[pair[::-1] for pair in pairs(other.loaded_states)]]
            assert not set(here) & {place for place, _ in others}, "a place is copied twice at a time"
            assert not set(there) & {place for _, place in others} or (loaded and other.loaded_states)
        for step in self._issued:
            if step.step_id > swap.completed:
                self._check_beside(swap, step)
        self._copying.append((swap, {place: self.states[place] for place, _ in stored}))
        self.counts.update({"stored states": len(stored), "loaded states": len(loaded)})
        super().take_swap(swap)

    def _check_beside(self, swap: Swap, step: Step) -> None:
        """The one may be made while the other is executed."""
        written = {place for _, place in pairs(step.kept)}
        named = written | {place for place, _ in pairs(step.restored)}
        assert not named & {place for _, place in pairs(swap.loaded_states)}, "a place is named while it is loaded"
        assert not written & {place for place, _ in pairs(swap.stored_states)}, "a place is written while it is stored"

    def _copy(self, last: int) -> None:
        while self._copying and self._copying[0][0].number <= last:
            swap, content = self._copying.popleft()
            for place, there in pairs(swap.stored_states):
                assert self.states[place] is content[place], "a state changed before it was copied"
                self._host_states[there] = content[place]
            for there, place in pairs(swap.loaded_states):
                self.states[place] = self._host_states[there]
        super()._copy(last)


class StateSwapRun(SwapRun):
    """A run with both."""

    worker: StateSwapWorker

    def begin_worker(self) -> None:
        self.worker = StateSwapWorker(self.settings, lags=self.lags)
