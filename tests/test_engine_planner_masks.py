"""The planner where masks of requests with a grammar come late: few wait for one, not for long; it is never stale."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from masked_run import MaskedRun, constrained
from simulated_worker import VOCABULARY, undisturbed
from tercet.ipc.step_messages import Abort, Sibling, Submit
from test_engine_planner import random_speculation, settings, submit, tight_sizes
from test_engine_planner_restart import prompt_of, restart


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_with_late_masks(seed: int) -> None:
    draw = random.Random(seed)
    chosen = settings(
        **tight_sizes(draw),
        deterministic=draw.random() < 0.4,
        speculation=draw.choice([None, random_speculation(draw)]),
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
