"""The planner of a model that carries states, with pages and states in the host's memory: when a state is stored, what
of pages and states is loaded, behind what, and when it is not worth it.
"""

import numpy as np
import pytest

from state_swap_worker import StateSwapRun
from state_worker import pairs
from tercet.ipc.step_messages import Abort
from tercet.ipc.swap_messages import Swap
from test_engine_planner import submit
from test_engine_planner_restart import restart
from test_engine_planner_states import next_step, stateful
from test_engine_swaps import forget, serve

FIRST, SECOND = list(range(20)), list(range(20, 40))
"""Of both the first 16 tokens are in pages of 4 and tiles of 8."""


def state_run(**changes: object) -> StateSwapRun:
    base = {"kept_states": 1, "num_host_pages": 100, "num_host_states": 10, "page_bytes": 1000, "state_bytes": 10**6}
    return StateSwapRun(stateful(**{**base, **changes}))


def next_swap(run: StateSwapRun) -> Swap:
    swap = run.planner.swap()
    assert swap is not None
    run.worker.take_swap(swap)
    return swap


def next_load(run: StateSwapRun) -> tuple[int, int]:
    """Pages and states of a swap that loads."""
    swap = next_swap(run)
    assert swap.stores == swap.stored_states == b""
    return len(pairs(swap.loads)), len(pairs(swap.loaded_states))


def test_a_state_alone_comes_back() -> None:
    run = state_run()
    assert [serve(run, submit(0, FIRST)), serve(run, submit(1, SECOND))] == [0, 0]
    before = run.planner.load()
    run.planner.submit(submit(2, FIRST), 0.0)
    assert next_load(run) == (0, 1)
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 16
    load = run.planner.load()
    assert (load.num_prefix_hits, load.num_host_hits) == (16, 16)
    assert load.num_loaded_bytes == 10**6
    assert load.num_stored_bytes == before.num_stored_bytes >= 2 * 10**6


def test_both_come_back() -> None:
    run = state_run(num_pages=12)
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST), 0.0)
    assert next_load(run) == (4, 1)
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 16
    assert run.planner.load().num_loaded_bytes == 4000 + 10**6


def test_pages_come_back_to_a_state_that_is_kept() -> None:
    run = state_run(num_pages=12, kept_states=2)
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST), 0.0)
    assert next_load(run) == (4, 0)
    run.planner.submit(submit(3, SECOND, max_tokens=1), 0.0)  # whose own state finds that one held, or younger
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 16
    assert run.planner.load().num_host_hits == 16


def test_pages_are_loaded_up_to_a_state() -> None:
    """Those behind it, of an answer, are of no use."""
    run = state_run(num_pages=12)
    serve(run, submit(0, FIRST, max_tokens=9))
    forget(run, 1)
    run.planner.submit(submit(2, [*FIRST, *run.said[0], 3], max_tokens=2), 0.0)
    assert next_load(run) == (4, 1)
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 16


def test_a_state_is_stored_once_when_its_plan_is_complete() -> None:
    run = state_run()
    run.planner.submit(submit(0, FIRST, max_tokens=30), 0.0)
    next_step(run)
    run.execute()
    swap = next_swap(run)
    assert (len(pairs(swap.stores)), swap.stored_states) == (4, b"")
    step = next_step(run)
    assert len(pairs(step.kept)) == 1
    run.tell()
    assert run.planner.swap() is None
    run.execute()
    swap = next_swap(run)
    assert (pairs(swap.stored_states), swap.completed) == ([(7, 0)], step.step_id)
    run.finish()
    serve(run, submit(1, FIRST))
    assert run.worker.counts["stored states"] == 1


def test_a_state_is_stored_while_others_begin_from_it() -> None:
    run = state_run()
    run.planner.submit(submit(0, FIRST, max_tokens=30), 0.0)
    next_step(run)
    run.execute()
    next_swap(run)
    run.tell()
    step = next_step(run)
    assert run.planner.swap() is None
    run.planner.submit(submit(1, FIRST), 0.0)
    assert pairs(next_step(run).restored) == [(7, 1)]
    run.execute()
    swap = next_swap(run)
    assert (pairs(swap.stored_states), swap.completed) == ([(7, 0)], step.step_id)
    run.finish()


def test_a_place_is_loaded_over_behind_plans_that_name_it() -> None:
    run = state_run()
    serve(run, submit(0, FIRST))
    serve(run, submit(1, SECOND))
    run.planner.submit(submit(2, SECOND, max_tokens=30), 0.0)
    step = next_step(run)
    assert pairs(step.restored) == [(7, 0)]
    run.planner.submit(submit(3, FIRST), 0.0)
    assert run.planner.swap() is None
    next_step(run)
    run.execute()
    swap = next_swap(run)
    assert (pairs(swap.loaded_states), swap.completed) == ([(0, 7)], step.step_id)
    run.finish()
    assert [run.ended[number].usage.num_cached_tokens for number in (2, 3)] == [16, 16]


def test_what_is_gone_before_it_could_be_stored_is_lost() -> None:
    run = state_run()
    for number, prompt in enumerate((FIRST, SECOND)):
        run.planner.submit(submit(number, prompt, max_tokens=8), 0.0)
        for _ in range(2):
            next_step(run)
            run.execute()
    run.finish()
    assert run.worker.counts["stored states"] == 1
    assert [serve(run, submit(3, SECOND)), serve(run, submit(2, FIRST))] == [16, 0]


def test_without_a_place_it_is_computed() -> None:
    """The only one is held, until its state is stored."""
    run = state_run()
    serve(run, submit(0, FIRST))
    run.planner.submit(submit(1, SECOND, max_tokens=8), 0.0)
    for _ in range(2):
        next_step(run)
        run.execute()
    swap = next_swap(run)
    assert len(pairs(swap.stored_states)) == 1
    run.planner.submit(submit(2, FIRST), 0.0)
    assert run.planner.swap() is None
    assert [enter.first for enter in next_step(run).enter] == [0]
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 0


@pytest.mark.parametrize(("length", "num_cached"), [(7, 0), (8, 0), (9, 8)])
def test_little_is_computed(length: int, num_cached: int) -> None:
    run = state_run(state_tile=4)
    serve(run, submit(0, FIRST[:length]))
    serve(run, submit(1, SECOND))
    assert serve(run, submit(2, FIRST[:length])) == num_cached


def test_who_wants_the_same_waits_for_it() -> None:
    run = state_run(max_num_seqs=3)
    serve(run, submit(0, FIRST))
    serve(run, submit(1, SECOND))
    for number in (2, 3):
        run.planner.submit(submit(number, FIRST, seed=number), 0.0)
    assert next_load(run) == (0, 1)
    assert run.planner.swap() is None
    assert run.planner.plan(0.0) is None
    run.finish()
    assert [run.ended[number].usage.num_cached_tokens for number in (2, 3)] == [16, 16]
    assert run.planner.load().num_host_hits == 32
    assert run.worker.counts["loaded states"] == 1


def test_who_is_cancelled_leaves_the_state_to_others() -> None:
    run = state_run()
    serve(run, submit(0, FIRST))
    serve(run, submit(1, SECOND))
    run.planner.submit(submit(2, FIRST), 0.0)
    next_load(run)
    run.planner.abort(Abort(np.array([2], np.int64).tobytes()))
    run.finish()
    assert serve(run, submit(3, FIRST)) == 16
    assert run.worker.counts["loaded states"] == 1


def test_places_on_the_host_are_given_on() -> None:
    """To the state of another, once the one there was read; then that one is stored again when it is used."""
    run = state_run(num_host_states=1)
    serve(run, submit(0, FIRST))
    assert serve(run, submit(1, SECOND)) == 0  # takes both its places
    assert serve(run, submit(2, FIRST)) == 0
    assert serve(run, submit(3, SECOND)) == 0
    assert serve(run, submit(4, SECOND)) == 16
    assert run.worker.counts["loaded states"] == 0
    run = state_run(num_host_states=1, kept_states=2)
    serve(run, submit(0, FIRST))
    serve(run, submit(1, SECOND))
    assert serve(run, submit(2, FIRST)) == 16
    serve(run, submit(3, [7] * 20))  # in place of the second, here; there in place of the first
    serve(run, submit(4, FIRST))
    serve(run, submit(5, [8] * 20))
    assert [run.worker.counts["stored states"], run.worker.counts["loaded states"]] == [6, 0]
    assert serve(run, submit(6, [8] * 20)) == 16


def test_of_two_states_the_one_that_came_stays_readable() -> None:
    """One place for a state here, two on the host: whoever comes has its own back, again and again."""
    run = state_run(num_host_states=2)
    serve(run, submit(0, FIRST))
    serve(run, submit(1, SECOND))
    for number in range(2, 12, 2):
        assert [serve(run, submit(number, FIRST)), serve(run, submit(number + 1, SECOND))] == [16, 16]
    assert run.worker.counts["loaded states"] == 10
    assert run.worker.counts["stored states"] == 2
    serve(run, submit(20, [7] * 20))
    serve(run, submit(21, [8] * 20))
    assert [serve(run, submit(22, [7] * 20)), serve(run, submit(23, FIRST))] == [16, 0]


def test_new_workers_have_nothing() -> None:
    run = state_run()
    serve(run, submit(0, FIRST))
    serve(run, submit(1, SECOND))
    run.planner.submit(submit(2, FIRST), 0.0)
    next_load(run)
    assert restart(run) == []
    run.begin_worker()
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 0
    serve(run, submit(3, SECOND))
    assert serve(run, submit(4, FIRST)) == 16


def test_without_the_host_nothing_is_copied() -> None:
    run = state_run(num_host_pages=0, num_host_states=0)
    serve(run, submit(0, FIRST))
    serve(run, submit(1, SECOND))
    assert run.planner.swap() is None
    assert serve(run, submit(2, FIRST)) == 0
