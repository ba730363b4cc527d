"""The simulated worker with states: what lies in a place is the very tokens that were computed to get there.

A state is read whole and written whole, so a token that is computed twice, left out, or computed behind another's
prefix is found out at once; so is a copy that comes a plan too late.
"""

from collections import Counter

import numpy as np

from simulated_worker import SimulatedWorker, root
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Sampled, Step

State = tuple[bytes, tuple[int, ...]]
"""Of which adapter, and of which tokens."""
_RUBBISH: State = b"another's", ()


class StateWorker(SimulatedWorker):
    """Places 0 to max_num_seqs - 1 are slots', the one behind them is padding's, the others are for copies."""

    def __init__(self, chosen: PlannerSettings) -> None:
        super().__init__(chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens)
        self._tile = chosen.state_tile
        self._places = range(chosen.max_num_seqs + 1, chosen.max_num_seqs + 1 + chosen.kept_states)
        self.states: dict[int, State] = {}
        self.counts: Counter[str] = Counter()

    def issue(self, step: Step) -> None:
        assert not step.awaits, "a row that draws nothing would be computed again"
        super().issue(step)
        kept, restored = pairs(step.kept), pairs(step.restored)
        assert all(slot in self._occupied and place in self._places for slot, place in kept)
        for half in (0, 1):
            assert len({pair[half] for pair in kept}) == len(kept), "a slot or a place has two copies in one plan"
        assert not {slot for slot, _ in kept} & {enter.slot for enter in step.enter}
        starts = {slot: start for slot, start, _ in self._rows(step)}
        assert {slot for _, slot in restored} == {enter.slot for enter in step.enter if starts[enter.slot]}
        assert len({slot for _, slot in restored}) == len(restored)
        assert all(place in self._places for place, _ in restored)

    def _apply(self, step: Step) -> None:
        for slot, place in pairs(step.kept):
            self.counts["evicted"] += place in self.states
            self.states[place] = self.states[slot]
        self.states |= {enter.slot: _RUBBISH for enter in step.enter}
        for place, slot in pairs(step.restored):
            self.states[slot] = self.states[place]
        super()._apply(step)
        self.counts["kept"] += len(pairs(step.kept))
        self.counts["restored"] += len(pairs(step.restored))

    def _run_row(
        self, slot_index: int, start: int, length: int, written: dict[tuple[int, int], bytes], *, draws: bool
    ) -> int:
        if start >= 0:
            assert start % self._tile == 0
            assert (start + length) % self._tile == 0 or start + length == len(self._slots[slot_index].tokens)
        return super()._run_row(slot_index, start, length, written, draws=draws)

    def _compute(self, slot_index: int, start: int, length: int, written: dict[tuple[int, int], bytes]) -> bytes:
        prefix = super()._compute(slot_index, start, length, written)
        slot = self._slots[slot_index]
        tokens = tuple(slot.tokens[: start + length])
        if start:  # at the beginning nothing of a state is read
            assert self.states[slot_index] == (root(slot.sampling), tokens[:start])
        self.states[slot_index] = root(slot.sampling), tokens
        return prefix

    def _run_trial(self, slot_index: int, num_guesses: int, written: dict[tuple[int, int], bytes]) -> list[int]:
        """The state moves on by the tokens that hold, of which the newest is not computed yet."""
        token_ids = super()._run_trial(slot_index, num_guesses, written)
        slot = self._slots[slot_index]
        if max(token_ids) >= 0:
            self.states[slot_index] = root(slot.sampling), tuple(slot.tokens[:-1])
        return token_ids

    def execute(self) -> Sampled:
        sampled = super().execute()
        for index, slot in self._slots.items():
            adapter, tokens = self.states[index]
            assert adapter == root(slot.sampling)
            assert list(tokens) == slot.tokens[: len(tokens)], "a slot has another's state"
        return sampled


def pairs(packed: bytes) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in np.frombuffer(packed, np.int32).reshape(-1, 2).tolist()]
