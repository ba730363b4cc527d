"""The planner with pages in the host's memory: what is stored and when, who waits for what, what is left to whom."""

import numpy as np
import pytest

from swap_worker import SwapRun, pairs
from tercet.engine.swaps import LEAST_LOADED, MOST_STORED
from tercet.ipc.step_messages import Abort, Submit
from tercet.ipc.swap_messages import Swap
from test_engine_planner import settings, submit
from test_engine_planner_families import several, singles
from test_engine_planner_restart import restart

FIRST = list(range(20))


def swap_run(**changes: object) -> SwapRun:
    return SwapRun(settings(**{"num_pages": 12, "num_host_pages": 100, "page_bytes": 1000, **changes}))


def serve(run: SwapRun, request: Submit) -> int:
    """Alone, to its end; returns how many of its tokens were cached."""
    assert run.planner.submit(request, 0.0) is None
    run.finish()
    return run.ended[request.number].usage.num_cached_tokens


def forget(run: SwapRun, number: int) -> None:
    """Have the cache hold nothing but another's pages."""
    most = (run.settings.num_pages - 1) * run.settings.page_size
    serve(run, submit(number, [49] * (most - 3), salt=str(number), max_tokens=4))


def next_swap(run: SwapRun) -> Swap:
    swap = run.planner.swap()
    assert swap is not None
    run.worker.take_swap(swap)
    return swap


def test_what_left_comes_back() -> None:
    run = swap_run()
    assert serve(run, submit(0, FIRST, max_tokens=4)) == 0
    assert serve(run, submit(1, FIRST)) == 16
    assert run.planner.load().num_host_hits == 0
    forget(run, 2)
    assert serve(run, submit(3, FIRST)) == 16
    load = run.planner.load()
    assert (load.num_prefix_hits, load.num_host_hits) == (32, 16)
    assert load.num_loaded_bytes == 4000
    assert load.num_stored_bytes == 1000 * (6 + 11)  # an answer filled the sixth; and another's
    assert load.num_host_pages == 100


def test_it_is_stored_once_when_its_step_is_complete() -> None:
    run = swap_run(max_num_batched_tokens=8, num_pages=40)
    run.planner.submit(submit(0, FIRST), 0.0)
    for _ in range(2):
        assert run.planner.swap() is None
        run.plan()
    assert run.planner.swap() is None
    run.execute()
    swap = next_swap(run)
    assert len(pairs(swap.stores)) == 2
    assert swap.completed == 0
    run.plan()
    run.execute()
    assert run.planner.swap() is None  # one at a time
    run.tell()
    assert len(pairs(next_swap(run).stores)) == 2
    run.finish()
    stored = run.planner.load().num_stored_bytes
    assert serve(run, submit(1, FIRST)) == 16
    assert run.planner.load().num_stored_bytes == stored


def test_so_many_are_stored_at_a_time() -> None:
    run = swap_run(num_pages=60, max_num_batched_tokens=256)
    run.planner.submit(submit(0, list(range(4 * MOST_STORED + 9)), max_tokens=1), 0.0)
    run.plan()
    run.execute()
    assert len(pairs(next_swap(run).stores)) == MOST_STORED
    run.tell()
    assert len(pairs(next_swap(run).stores)) == 2
    run.finish()


def test_what_is_gone_before_it_could_be_stored_is_lost() -> None:
    run = swap_run()
    run.planner.submit(submit(0, FIRST), 0.0)
    while not run.planner.idle:
        run.plan()
        run.execute()
    run.planner.submit(submit(1, [49] * 44, max_tokens=1), 0.0)
    while not run.planner.idle:
        run.plan()
        run.execute()
    run.finish()
    assert run.planner.load().num_stored_bytes == 11_000
    assert serve(run, submit(2, FIRST)) == 0


@pytest.mark.parametrize(("length", "num_cached"), [(4 * LEAST_LOADED, 0), (4 * LEAST_LOADED + 1, 4 * LEAST_LOADED)])
def test_little_is_computed(length: int, num_cached: int) -> None:
    """A prompt's last token is computed in any case: its page is not loaded."""
    run = swap_run()
    prompt = FIRST[:length]
    serve(run, submit(0, prompt))
    forget(run, 1)
    assert serve(run, submit(2, prompt)) == num_cached


def test_what_asks_about_all_tokens_computes_them() -> None:
    run = swap_run()
    serve(run, submit(0, FIRST))
    forget(run, 1)
    assert serve(run, submit(2, FIRST, prompt_logprobs=1)) == 0
    assert run.planner.load().num_loaded_bytes == 0


def test_what_the_cache_has_is_not_loaded() -> None:
    run = swap_run()
    serve(run, submit(0, FIRST, max_tokens=1))
    serve(run, submit(1, [49] * 36, max_tokens=1))  # takes what is free, and the end of it
    assert run.planner.load().num_free_pages == 11
    run.planner.submit(submit(2, FIRST), 0.0)
    assert len(pairs(next_swap(run).loads)) == 2
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 16
    assert run.planner.load().num_host_hits == 8


def test_others_pass_and_its_room_is_left_to_it() -> None:
    run = swap_run(max_num_seqs=2)
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST, max_tokens=4), 0.0)
    for number in (3, 4):
        run.planner.submit(submit(number, [48] * 12, salt=str(number), max_tokens=4), 0.0)
    swap = next_swap(run)
    assert (len(pairs(swap.loads)), swap.stores) == (4, b"")
    step = run.planner.plan(0.0)
    assert step is not None
    assert len(step.enter) == 1  # of two slots and eleven pages one slot and five pages are promised
    run.worker.issue(step)
    run.tell()
    step = run.planner.plan(0.0)
    assert step is not None
    assert [enter.num_tokens for enter in step.enter] == [20]
    assert step.swapped == swap.number
    run.worker.issue(step)
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 16


def test_pages_are_left_to_it_too() -> None:
    run = swap_run()
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST + [7] * 8, max_tokens=4), 0.0)
    run.planner.submit(submit(3, [48] * 18, max_tokens=4), 0.0)
    next_swap(run)
    assert run.planner.plan(0.0) is None  # five of seven pages would do, were not three of them another's
    run.tell()
    step = run.planner.plan(0.0)
    assert step is not None
    assert [enter.num_tokens for enter in step.enter] == [28]
    run.worker.issue(step)
    run.finish()


def test_who_wants_the_same_waits_for_it_and_nothing_is_loaded_twice() -> None:
    run = swap_run(num_pages=30)
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST), 0.0)
    run.planner.submit(submit(3, [*FIRST[:17], 3], seed=2), 0.0)
    assert len(pairs(next_swap(run).loads)) == 4
    assert run.planner.swap() is None
    assert run.planner.plan(0.0) is None
    run.finish()
    assert [run.ended[number].usage.num_cached_tokens for number in (2, 3)] == [16, 16]
    assert run.planner.load().num_loaded_bytes == 4000
    assert run.planner.load().num_host_hits == 32


def test_answers_to_one_prompt() -> None:
    run = swap_run(num_pages=40)
    request = several(10, FIRST, 3, max_tokens=9)
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(request, 0.0)
    assert len(pairs(next_swap(run).loads)) == 4
    run.finish()
    assert {number: run.said[number] for number in (10, 11, 12)} == singles(request)
    assert run.planner.load().num_loaded_bytes == 4000


def test_who_is_cancelled_leaves_what_was_loaded_to_others() -> None:
    run = swap_run()
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST), 0.0)
    next_swap(run)
    run.planner.abort(Abort(np.array([2], np.int64).tobytes()))
    assert run.planner.idle
    assert run.planner.load().num_free_pages == 11 - 4
    run.tell()
    assert run.planner.load().num_free_pages == 11
    assert run.planner.swap() is None
    assert serve(run, submit(3, FIRST)) == 16
    assert run.planner.load().num_loaded_bytes == 4000


def test_what_is_gone_again_is_computed() -> None:
    """It is asked for once: others may want the room, too."""
    run = swap_run(max_num_seqs=1)
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST, max_tokens=4), 0.0)
    next_swap(run)
    run.tell()
    run.planner.submit(submit(3, [48] * 41, salt="urgent", max_tokens=1), 0.0)
    first, second = run.planner._waiting
    second.priority, first.priority = 0, 1
    run.planner._waiting._line.reverse()
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 0
    assert run.planner.load().num_loaded_bytes == 4000


def test_preempted_requests_have_their_pages_back() -> None:
    run = swap_run(max_num_seqs=3)
    requests = [submit(number, [number] * 9, max_tokens=30, seed=number) for number in range(3)]
    for request in requests:
        run.planner.submit(request, 0.0)
    while not run.planner.idle:
        run.swap()
        while run.worker.swaps:
            run.tell()
            run.swap()
        run.plan()
        if run.worker.can_execute:
            run.execute()
    run.finish()
    load = run.planner.load()
    assert load.num_preemptions
    assert load.num_host_hits


def test_new_workers_have_nothing() -> None:
    run = swap_run()
    serve(run, submit(0, FIRST))
    forget(run, 1)
    run.planner.submit(submit(2, FIRST), 0.0)
    next_swap(run)
    assert restart(run) == []
    run.worker = SwapRun(run.settings).worker
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 0
    forget(run, 3)
    assert serve(run, submit(4, FIRST)) == 16


def test_without_there_is_nothing_to_do() -> None:
    run = SwapRun(settings())
    run.planner.submit(submit(0, FIRST), 0.0)
    step = run.planner.plan(0.0)
    assert step is not None
    assert step.swapped == 0
    assert run.planner.swap() is None
    run.worker.issue(step)
    run.finish()
    assert run.planner.swap() is None
