"""Rows are planned ahead of their masks where these come in time, and for how long a draw waits: steps take 10 ms."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from masked_run import MaskedRun, constrained
from tercet.ipc.step_messages import Computed, Submit
from test_engine_planner import settings, submit

_BOOTED = 1e6
"""What the clock says first: no time that anybody has waited for."""
_STEP = 0.010


@dataclass
class Seen:
    """Of one plan, and when its tokens were there."""

    ended: float
    num_rows: int
    """Decodes."""
    num_late: int
    has_prompts: bool
    has_masked: bool


@pytest.mark.parametrize(("delay", "share"), [(0.001, 1), (0.003, 1), (0.004, 1 / 3), (0.012, 1 / 4)])
def test_beside_others_a_row_goes_ahead_of_a_mask_that_comes_in_time(delay: float, share: float) -> None:
    """Two plans are in flight, and the row is in all of them; where its mask takes a good part of a step, in those that
    are made once it is there. It holds nobody up."""
    seen = follow_clock([(0.0, plain(0)), (0.0, masked(1))], lambda number: delay)
    plans = seen[40:]
    assert sum(plan.num_rows == 2 for plan in plans) / len(plans) == pytest.approx(share, abs=0.03)
    assert not any(plan.num_late for plan in plans)
    assert plans[-1].ended - plans[0].ended < (len(plans) - 1) * _STEP * 1.02


@pytest.mark.parametrize("delay", [0.002, 0.009, 0.014])
def test_answers_that_all_have_a_grammar_keep_together(delay: float) -> None:
    """Four that begin apart: all are in each step, whose rows are computed while their masks are."""
    arrivals = [(0.0, masked(0)), (0.0, masked(1)), (0.034, masked(2)), (0.034, masked(3))]
    plans = follow_clock(arrivals, lambda number: delay)[-20:]
    assert {plan.num_rows for plan in plans} == {4}
    assert not any(plan.num_late for plan in plans)
    assert plans[-1].ended - plans[0].ended == pytest.approx(19 * max(_STEP, delay), rel=0.05)


def test_who_is_slow_holds_the_others_up_for_a_moment_only() -> None:
    """The masks of one take 200 ms: the other three get a token in nearly each step."""
    arrivals = [(0.0, masked(0)), (0.0, masked(1)), (0.034, masked(2)), (0.034, masked(3))]
    seen = follow_clock(arrivals, lambda number: 0.2 if number == 3 else 0.002)
    drawn = sum(plan.num_rows - plan.num_late for plan in seen if plan.ended > _BOOTED + 0.2)
    assert drawn > 0.75 * 3 * (0.8 / _STEP)


@pytest.mark.parametrize(("delay", "share"), [(0.002, 1 / 2), (0.004, 1 / 3)])
def test_plans_with_prompts_wait_a_moment_for_masks(delay: float, share: float) -> None:
    """Such plans go ahead of no mask. One that comes within a quarter of a step is in time for the next but one."""
    arrivals = [(0.0, plain(0)), (0.0, masked(1))]
    arrivals += [(0.1, submit(n + 2, [n % 50, n // 50, *range(18)], max_tokens=1)) for n in range(90)]
    plans = [plan for plan in follow_clock(arrivals, lambda number: delay) if plan.has_prompts][10:]
    assert len(plans) > 60
    assert sum(plan.has_masked for plan in plans) / len(plans) == pytest.approx(share, abs=0.05)
    assert plans[-1].ended - plans[0].ended < (len(plans) - 1) * _STEP * 1.05


def test_a_new_prompt_waits_for_no_slow_mask() -> None:
    """One answer's mask takes long, and there is nobody else; then a prompt comes, and is in the next plan soon."""
    run = MaskedRun(settings(max_num_seqs=2))
    run.planner.submit(constrained(0, [1, 2], max_tokens=9), 0.0)
    assert not run.plan()
    run.answer()
    assert run.plan()
    run.execute()
    run.now = 1.0
    step = run.planner.plan(run.now)
    assert step is not None
    assert step.awaits
    run.worker.issue(step)
    run.planner.submit(submit(1, [3, 4], max_tokens=9), run.now)
    assert run.planner.wakes_at(run.now) is None
    run.planner.computed(Computed(step.step_id, 0), 1.010)
    assert run.planner.wakes_at(run.now) == pytest.approx(1.020)  # it has waited for as long as a step takes
    run.now = 1.0199
    assert not run.draw()
    run.now = 1.0201
    assert run.draw()
    assert run.num_late == 1
    assert run.plan()
    run.finish()


def masked(number: int) -> Submit:
    return constrained(number, [3, number], max_tokens=300)


def plain(number: int) -> Submit:
    return submit(number, [3, number], max_tokens=300)


def follow_clock(arrivals: list[tuple[float, Submit]], delay_of: Callable[[int], float]) -> list[Seen]:
    """The plans that end within a second; masks come so long after they are asked for, and draws take no time."""
    run = MaskedRun(settings(max_num_seqs=8, num_pages=400, max_model_len=400))
    due: dict[int, float] = {}
    free_at, seen, running = 0.0, list[Seen](), deque[Seen]()
    for tick in range(10_000):
        run.now = now = _BOOTED + tick / 10_000
        while arrivals and _BOOTED + arrivals[0][0] <= now:
            assert run.planner.submit(arrivals.pop(0)[1], now) is None
        while running and running[0].ended <= now and run.worker.can_execute:
            seen.append(running.popleft())
            run.planner.complete(run.worker.execute(), now)
        if (step_id := run.worker.computed) is not None and running[0].ended <= now:
            run.planner.computed(Computed(step_id, 0), running[0].ended)
        for followed in run.masks.asked:
            due.setdefault(id(followed), now + delay_of(run.number_of(followed)))
        for index, followed in reversed(list(enumerate(run.masks.asked))):
            if due[id(followed)] <= now:
                del due[id(followed)]
                run.answer(index)
        while True:
            if (draw := run.planner.draw(now)) is not None:
                run.worker.draw(draw)
                if draw.more_come:
                    continue
                running[-1].num_late = len(draw.late) // 4
                running[-1].ended = free_at = max(free_at, now)
            elif (step := run.planner.plan(now)) is not None:
                run.worker.issue(step)
                free_at = max(free_at, now) + _STEP
                decodes = np.frombuffer(step.decodes, np.int32)
                has_masked = bool(run.planner._slots.constrained[decodes].any())
                running.append(Seen(free_at, len(decodes), 0, bool(step.chunks), has_masked))
            else:
                break
        wakes_at = run.planner.wakes_at(now)
        assert wakes_at is None or wakes_at > now, "it would turn in circles"
    return seen
