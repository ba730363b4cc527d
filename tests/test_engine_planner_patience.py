"""When the planner waits for masks, and how long: steps take 10 ms, and a clock says when masks come."""

from collections import deque

import pytest

from test_engine_planner import settings, submit
from test_engine_planner_masks import MaskedRun, constrained

_BOOTED = 1e6
"""What the clock says first: no time that anybody has waited for."""


@pytest.mark.parametrize(("delay", "share"), [(0.001, 1 / 2), (0.004, 1 / 3)])
def test_the_next_plan_waits_a_moment_for_masks(delay: float, share: float) -> None:
    """Steps of 10 ms, two in flight: a mask that takes a moment comes in time, a late one holds nobody up."""
    run = MaskedRun(settings(max_num_seqs=2))
    run.planner.submit(submit(0, [1, 2], max_tokens=150), 0.0)
    run.planner.submit(constrained(1, [3, 4], max_tokens=100), 0.0)
    plans = []

    def plan(now: float) -> bool:
        step = run.planner.plan(now)
        if step is not None:
            run.worker.issue(step)
            plans.append(len(step.masks) // 8)
        return step is not None

    for moment in range(100):
        now = moment / 100
        if run.worker.in_flight:
            run.planner.complete(run.worker.execute(), now)
        if not plan(now):
            assert 0 < run.planner.patience(now) < 0.0026
            if delay > run.planner.patience(now):
                assert plan(now + 0.0026)
        if run.masks.asked:
            run.answer()
        while plan(now + delay):
            pass
        assert run.worker.in_flight == 2
    assert sum(plans[10:]) / len(plans[10:]) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(("delay", "together"), [(0.002, True), (0.012, False)])
def test_halves_become_a_whole(delay: float, together: bool) -> None:
    """Four answers, all with a grammar, that begin apart: steps of 10 ms have all of them once masks are quicker."""
    sizes = follow_clock(delay, [(0.0, 0), (0.0, 1), (0.034, 2), (0.034, 3)], slow=None)
    assert set(sizes[-20:]) == ({4} if together else {2})


def test_who_is_slow_holds_the_others_up_for_a_moment_only() -> None:
    """The masks of one take 200 ms: the other three get a token in nearly each step."""
    sizes = follow_clock(0.002, [(0.0, 0), (0.0, 1), (0.034, 2), (0.034, 3)], slow=3)
    assert sum(sizes[-40:]) > 0.8 * 40 * 3


def follow_clock(delay: float, arrivals: list[tuple[float, int]], slow: int | None) -> list[int]:
    """Rows in each of the plans that end within a second; masks come `delay` after they are asked for."""
    run = MaskedRun(settings(max_num_seqs=4, num_pages=400, max_model_len=400))
    due: dict[int, float] = {}
    free_at, sizes, running = 0.0, list[int](), deque[tuple[float, int]]()
    for tick in range(10_000):
        run.now = now = _BOOTED + tick / 10_000
        while arrivals and _BOOTED + arrivals[0][0] <= now:
            number = arrivals.pop(0)[1]
            assert run.planner.submit(constrained(number, [3, number], max_tokens=300), now) is None
        while running and running[0][0] <= now:
            sizes.append(running.popleft()[1])
            run.planner.complete(run.worker.execute(), now)
        for followed in run.masks.asked:
            late = 0.2 if slow is not None and run.number_of(followed) == slow else delay
            due.setdefault(id(followed), now + late)
        for index, followed in reversed(list(enumerate(run.masks.asked))):
            if due[id(followed)] <= now:
                del due[id(followed)]
                run.answer(index)
        while (step := run.planner.plan(now)) is not None:
            run.worker.issue(step)
            free_at = max(free_at, now) + 0.010
            running.append((free_at, len(step.decodes) // 4))
    return sizes
