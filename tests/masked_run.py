"""A planner with a source of masks that answers when it is told to, driven by hand.

A mask here is the tokens of the answer that it was asked for, so that one of another moment is found out.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from tercet.engine.grammar_link import Followed
from tercet.engine.planner import Planner
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.grammar_messages import Allowed, Disallowed
from tercet.ipc.step_messages import Computed, Draw, Step, Submit
from test_engine_planner import Run, submit

ANY = Allowed(b"")
LATE = 1e9


class SlowMasks:
    """A source of masks that answers when it is told to. Its table has few rows, so that they are used again soon."""

    mask_table = "a table"

    def __init__(self, num_rows: int) -> None:
        self.table: list[bytes | None] = [None] * num_rows
        self._free_rows = deque(range(num_rows))
        self.asked: list[Followed] = []
        self.followed: set[Followed] = set()
        self.most = 0
        self._ready: list[Followed] = []

    def follow(self, grammar: str, token_ids: Sequence[int]) -> Followed:
        followed = Followed(grammar, array("i", token_ids), self._free_rows.popleft())
        self.table[followed.row] = None
        self.followed.add(followed)
        self.most = max(self.most, len(self.followed))
        self.asked.append(followed)
        return followed

    def extend(self, answers: Iterable[tuple[Followed, int]]) -> None:
        for followed, token_id in answers:
            assert followed in self.followed
            assert followed not in self.asked, "asked before the last answer was there"
            followed.token_ids.append(token_id)
            self.table[followed.row] = None  # as soon as it is asked for it may be written
            self.asked.append(followed)

    def release(self, followed: Followed) -> None:
        self.followed.remove(followed)
        self._free_rows.append(followed.row)
        if followed in self.asked:
            self.asked.remove(followed)

    def answer(self, index: int = 0, failure: str | None = None) -> None:
        followed = self.asked.pop(index)
        followed.has_mask, followed.failure = not failure, failure
        self.table[followed.row] = followed.token_ids.tobytes()
        self._ready.append(followed)

    def take(self, message: Allowed | Disallowed) -> list[Followed]:
        ready, self._ready = self._ready, []
        return [one for one in ready if one in self.followed]

    def check(self) -> list[Followed]:
        return []


class MaskedRun(Run):
    """A run with a source of masks; looks at the masks of every plan."""

    def __init__(self, chosen: PlannerSettings) -> None:
        super().__init__(chosen)
        self.masks = SlowMasks(chosen.most_followed)
        self.planner = Planner(chosen, b"key", self.masks)
        self.now = 0.0
        self._rows: dict[tuple[int, int], int] = {}
        """Of masks: what plans in flight read, by plan and slot."""
        self.num_early = 0
        """Masks that came to the worker before the last of their plan."""
        self.num_late = 0
        """Rows that drew nothing."""

    def answer(self, index: int = 0, failure: str | None = None) -> list[int]:
        """Returns who failed."""
        self.masks.answer(index, failure)
        return [unservable.number for unservable in self.planner.take_masks(ANY, self.now)]

    def number_of(self, followed: Followed) -> int:
        """Of its request."""
        return self.planner._constraints._requests[followed].number

    def plan(self) -> bool:
        before = self.worker._last_issued
        if not super().plan():
            return False
        step = self.worker._queue[-1][0]
        assert step.step_id == before + 1
        assert step.count == 1 or not step.masks
        self._take_masks(step)
        return True

    def draw(self, *, late: bool = False) -> bool:
        """The rest of the last plan, if the planner gives it. `late`: a long time after its rows were computed."""
        if late and (step_id := self.worker.computed) is not None:
            self.planner.computed(Computed(step_id, self.planner.epoch), self.now)
        draw = self.planner.draw(LATE if late else self.now)
        if draw is None:
            return False
        self.worker.draw(draw)
        self._take_masks(draw)
        self.num_early += len(draw.masks) // 8 if draw.more_come else 0
        self.num_late += len(draw.late) // 4
        return True

    def _take_masks(self, message: Step | Draw) -> None:
        assert message.mask_table == (SlowMasks.mask_table if message.masks else "")
        for slot, row in np.frombuffer(message.masks, np.int32).reshape(-1, 2).tolist():
            self._rows[message.step_id, slot] = row

    def execute(self) -> None:
        step, _ = self.worker._queue[0]
        before = {slot: len(state.tokens) for slot, state in self.worker._slots.items()}
        before |= {enter.slot: enter.num_tokens for enter in step.enter}
        read = {slot: self.masks.table[self._rows.pop((step.step_id, slot))] for slot in self._masked(step)}
        there = self.planner._slots.alive.copy()
        super().execute()
        for slot, _, _ in self.worker._rows(step):
            state = self.worker._slots[slot]
            drawn = state.sampling.grammar is not None and len(state.tokens) > before[slot]
            if drawn and there[slot]:  # masks of those that have left are written over
                said = state.tokens[state.num_prompt : -1]
                assert read[slot] == array("i", said).tobytes(), "a stale mask"

    def _masked(self, step: Step) -> list[int]:
        return [slot for step_id, slot in self._rows if step_id == step.step_id]

    def finish(self) -> None:
        while not self.planner.idle:
            went_on = self.draw() or self.plan()
            if self.worker.can_execute:
                self.execute()
            elif not went_on:
                self.answer()
        super().finish()
        assert not self._rows
        assert not self.masks.followed


def constrained(number: int, prompt: list[int], **sampling: object) -> Submit:
    return submit(number, prompt, grammar="a grammar", **sampling)  # type: ignore[arg-type]
