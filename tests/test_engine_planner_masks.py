"""The planner where masks of requests with a grammar come late: few wait for one, not for long, and it is never stale.

A mask here is the tokens of the answer that it was asked for, so that one of another moment is found out.
"""

import random
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from simulated_worker import VOCABULARY, undisturbed
from tercet.engine.grammar_link import Followed
from tercet.engine.planner import Planner
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Abort, Allowed, Computed, Disallowed, Draw, Sibling, Step, Submit
from test_engine_planner import Run, settings, submit, tight_sizes
from test_engine_planner_restart import prompt_of, restart

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
        before |= {enter.slot: len(enter.token_ids) // 4 for enter in step.enter}
        read = {slot: self.masks.table[self._rows.pop((step.step_id, slot))] for slot in self._masked(step)}
        super().execute()
        for slot, _, _ in self.worker._rows(step):
            state = self.worker._slots[slot]
            if state.sampling.grammar is not None and len(state.tokens) > before[slot]:
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


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_with_late_masks(seed: int) -> None:
    draw = random.Random(seed)
    chosen = settings(
        **tight_sizes(draw),
        deterministic=draw.random() < 0.4,
    )
    run = MaskedRun(chosen)
    requests = {}
    for number in range(0, 60, 2):
        make = draw.choice([submit, constrained])
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 1, 4, 16]))]
        stops = [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 2]))]
        requests[number] = make(number, prompt, seed=draw.randrange(3), max_tokens=draw.randint(1, 18), stops=stops)
    waiting, aborted, failed, deaths = list(requests.values()), set[int](), set[int](), 0
    while waiting or not run.planner.idle:
        action = draw.random()
        if waiting and action < 0.2:
            assert run.planner.submit(waiting.pop(0), 0.0) is None
        elif action < 0.23 and len(waiting) < len(requests):
            number = draw.choice(list(requests)[: len(requests) - len(waiting)])
            if number not in run.ended and number not in failed:
                aborted.add(number)
            run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif action < 0.25 and deaths < 5:
            deaths += 1
            assert restart(run) == []
            run._rows.clear()
        elif run.masks.asked and action < 0.5:
            why = "no token" if draw.random() < 0.05 else None
            failed.update(run.answer(draw.randrange(len(run.masks.asked)), why))
        elif action < 0.7:
            run.draw(late=draw.random() < 0.3) or run.plan()
        elif run.worker.can_execute:
            run.execute()
    run.finish()
    assert run.masks.most <= 2 * chosen.max_num_seqs
    for number, request in requests.items():
        want = undisturbed(prompt_of(request), request.sampling)
        if number in aborted | failed:
            assert number not in run.ended
            want = want[: len(run.said[number])]
        assert run.said[number] == want


def test_nobody_waits_for_the_mask_of_another() -> None:
    """A mask that never comes: before the first step, and in the middle."""
    run = MaskedRun(settings(max_num_seqs=6))
    for number in (0, 2):
        assert run.planner.submit(constrained(number, [1, 2, 3], max_tokens=40), 0.0) is None
    assert not run.plan()
    run.answer(1)
    for _ in range(3):  # 2 has its first token, and waits for the mask of the second
        run.plan()
        if run.worker.can_execute:
            run.execute()
    assert [len(run.said[number]) for number in (0, 2)] == [0, 1]
    assert not run.draw(late=True), "who else is there?"
    for number in (1, 3):
        assert run.planner.submit(submit(number, [number, 5], max_tokens=50), 0.0) is None
    for _ in range(120):
        run.draw(late=True) or run.plan()
        if run.worker.can_execute:
            run.execute()
    assert run.num_late == 1
    assert [len(run.said[number]) for number in range(4)] == [0, 50, 1, 50]
    assert set(run.ended) == {1, 3}
    run.finish()
    assert [len(run.said[number]) for number in range(4)] == [40, 50, 40, 50]


def test_who_gets_no_mask_fails_alone() -> None:
    run = MaskedRun(settings())
    for number in range(3):
        assert run.planner.submit(constrained(number, [1, 2, 3], max_tokens=9), 0.0) is None
    assert not run.plan()
    assert run.answer(0, "too deep") == [0]
    run.answer(0)
    run.plan()
    run.execute()
    run.plan()
    assert not run.draw()
    assert run.answer(1, "no token") == [1]  # while its row is computed
    assert run.draw()
    assert run.num_late == 1
    run.finish()
    assert [len(run.said[number]) for number in range(3)] == [0, 1, 9]
    assert set(run.ended) == {2}


def test_a_suspect_is_not_passed_while_its_mask_is_computed() -> None:
    """Who ran when workers died runs alone: the next death has to name one."""
    run = MaskedRun(settings())
    assert run.planner.submit(constrained(0, [1, 2, 3], max_tokens=9), 0.0) is None
    assert not run.plan()
    run.answer()
    run.plan()
    assert restart(run, "a step failed") == []
    run._rows.clear()
    assert run.planner.submit(submit(1, [4, 5], max_tokens=9), 0.0) is None
    assert not run.plan()
    run.answer()
    run.plan()
    (failed,) = restart(run, "a step failed")
    assert failed.number == 0
    run._rows.clear()
    run.finish()
    assert set(run.ended) == {1}


def test_whoever_goes_first_gets_its_mask_though_others_have_theirs() -> None:
    """As many are asked about as may be, all of them wait, and then one comes whose turn is before theirs."""
    run = MaskedRun(settings(max_num_seqs=1))
    assert run.planner.submit(submit(0, [1, 2], max_tokens=9), 0.0) is None
    for number in (1, 2, 3):
        assert run.planner.submit(constrained(number, [1, 2, 3], max_tokens=5), 0.0) is None
    run.plan()
    for _ in range(2):
        run.answer()
    assert run.planner.submit(replace(constrained(4, [1, 2, 3], max_tokens=5), priority=-1), 0.0) is None
    run.finish()
    assert list(run.ended) == [0, 1, 4, 2, 3]  # it is passed by one while its mask is computed
    assert run.masks.most == 2


def test_a_family_with_a_grammar() -> None:
    run = MaskedRun(settings())
    first = constrained(0, list(range(9)), seed=4, max_tokens=7)
    siblings = tuple(Sibling(number, 4 + number) for number in (1, 2))
    sampling = first.sampling
    whole = Submit(0, first.prompt_ids, sampling, "", siblings=siblings)
    assert run.planner.submit(whole, 0.0) is None
    run.finish()
    assert sorted(run.ended) == [0, 1, 2]
    assert all(len(run.said[number]) == 7 for number in range(3))


def test_many_masks_go_to_workers_ahead_of_the_others() -> None:
    run = MaskedRun(settings(max_num_seqs=12, max_num_batched_tokens=64, num_pages=100))
    for number in range(12):
        assert run.planner.submit(constrained(number, [1, number], max_tokens=9), 0.0) is None
    assert not run.plan()
    for _ in range(12):
        run.answer()
    assert run.plan()
    run.execute()
    assert run.plan()
    assert len(run.masks.asked) == 12
    for count, (goes, early) in ((7, (False, 0)), (2, (True, 9)), (2, (False, 9)), (1, (True, 9))):
        for _ in range(count):
            run.answer()
        assert run.draw() == goes
        assert run.num_early == early
    assert run.worker.can_execute
    run.execute()
    run.finish()
    assert run.num_late == 0
