"""The planner of models that carry states: chunks in tiles, copies where prompts part, and who begins from them.

The worker is the simulated one, in which a state is the tokens that it was computed from.
"""

import numpy as np
import pytest

from simulated_worker import VOCABULARY, undisturbed
from state_worker import StateWorker, pairs
from tercet.engine.config import EngineConfig
from tercet.engine.planner_settings import PlannerSettings, check_at_once, make_settings
from tercet.engine.states import States
from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Abort, Step
from test_engine_planner import Run, settings, submit
from test_engine_planner_families import several, singles
from test_engine_planner_restart import restart


def stateful(**changes: object) -> PlannerSettings:
    """Pages of 4 tokens and tiles of 8: states are kept at multiples of 8."""
    base = {"state_tile": 8, "kept_states": 4, "max_num_batched_tokens": 64, "num_pages": 100}
    return settings(**{**base, **changes})


def begin(chosen: PlannerSettings) -> Run:
    run = Run(chosen)
    run.worker = StateWorker(chosen)
    return run


def next_step(run: Run) -> Step:
    step = run.planner.plan(0.0)
    assert step is not None
    run.worker.issue(step)
    return step


def chunks(step: Step) -> list[tuple[int, int]]:
    """First position and length of each."""
    return [(start, length) for _, start, length in np.frombuffer(step.chunks, np.int32).reshape(-1, 3).tolist()]


def ask(run: Run, number: int, prompt: list[int], **sampling: object) -> int:
    """Run a request to its end; returns how much of its prompt it did not compute."""
    message = submit(number, prompt, **sampling)  # type: ignore[arg-type]
    assert run.planner.submit(message, 0.0) is None
    run.finish()
    assert run.said[number] == undisturbed(prompt, message.sampling)
    return run.ended[number].usage.num_cached_tokens


def test_chunks_end_with_tiles_and_where_a_state_is_kept() -> None:
    run = begin(stateful(max_num_batched_tokens=21))
    run.planner.submit(submit(1, list(range(45))), 0.0)
    steps = [next_step(run)]
    for _ in range(3):
        run.execute()
        steps.append(next_step(run))
    assert [chunks(step) for step in steps] == [[(0, 16)], [(16, 16)], [(32, 8)], [(40, 5)]]
    assert [pairs(step.kept) for step in steps] == [[], [], [], [(0, 7)]]  # in the plan behind the one that ends at 40
    run.finish()


def test_a_prompt_that_fits_gets_its_state_copied_beside_its_end() -> None:
    run = begin(stateful())
    run.planner.submit(submit(1, list(range(24))), 0.0)
    first, second = next_step(run), next_step(run)
    assert (chunks(first), first.kept) == ([(0, 16)], b"")  # at 24 nothing would be left to compute
    assert (chunks(second), pairs(second.kept)) == ([(16, 8)], [(0, 7)])
    run.finish()


def test_short_prompts_and_no_places_cut_nothing() -> None:
    for chosen, length in ((stateful(), 8), (stateful(kept_states=0), 60)):
        run = begin(chosen)
        run.planner.submit(submit(1, list(range(length))), 0.0)
        assert chunks(next_step(run)) == [(0, length)]
        run.finish()
        assert run.worker.counts["kept"] == 0  # type: ignore[attr-defined]


def test_the_same_prompt_again_begins_from_the_state() -> None:
    run = begin(stateful())
    prompt = list(range(30))
    assert ask(run, 1, prompt) == 0
    run.planner.submit(submit(2, prompt), 0.0)
    step = next_step(run)
    assert (chunks(step), pairs(step.restored), step.kept) == ([(24, 6)], [(7, 0)], b"")
    assert [(enter.first, enter.num_tokens) for enter in step.enter] == [(24, 30)]
    run.finish()
    load = run.planner.load()
    assert (load.num_prefix_queries, load.num_prefix_hits) == (60, 24)
    assert ask(run, 3, prompt, adapter_load=1) == 0
    assert ask(run, 4, prompt[:29]) == 24
    assert ask(run, 5, prompt[:24]) == 0, "its last token has to be computed, and at 16 there is no state"
    assert ask(run, 6, prompt[:24]) == 16


def test_of_a_shared_beginning_the_second_keeps_and_the_third_has_the_state() -> None:
    run = begin(stateful())
    system = [9] * 22
    assert ask(run, 1, [*system, *range(10, 40)]) == 0
    run.planner.submit(submit(2, [*system, *range(20, 45)]), 0.0)
    steps = [next_step(run) for _ in range(2)]
    run.execute()
    steps.append(next_step(run))
    # 20 tokens are in pages: of those 16 end with a tile.
    assert [chunks(step) for step in steps] == [[(0, 16)], [(16, 24)], [(40, 7)]]
    assert [pairs(step.kept) for step in steps] == [[], [(0, 8)], [(0, 9)]]
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 0
    assert ask(run, 3, [*system, *range(25, 30)]) == 16


def test_a_conversation_goes_on_from_its_last_prompt() -> None:
    run = begin(stateful())
    prompt = list(range(27))
    cached = []
    for number in range(4):
        cached.append(ask(run, number, prompt, max_tokens=12))
        prompt = [*prompt, *run.said[number], 5, 6]
    assert cached == [0, 24, 40, 48]  # of prompts of 27, 41, 55 and 69


def test_no_cut_just_behind_a_state_that_is_kept() -> None:
    states = States(stateful(page_size=8, state_tile=16, kept_states=4))
    assert states.cuts(1000, 0, 300) == [288, 992]
    assert states.cuts(1000, 32, 32 + 511) == [992]  # as of a chat: the answer to its last prompt
    assert states.cuts(1000, 32, 32 + 527) == [544, 992]
    assert states.cuts(1000, 992, 992) == []


def test_whoever_is_admitted_in_the_plan_that_copies_begins_from_the_copy() -> None:
    run = begin(stateful())
    run.planner.submit(submit(1, list(range(20))), 0.0)
    next_step(run)
    run.planner.submit(submit(2, list(range(20))), 0.0)
    step = next_step(run)
    assert (pairs(step.kept), pairs(step.restored)) == ([(0, 7)], [(7, 1)])
    assert chunks(step) == [(16, 4), (16, 4)]
    run.finish()
    assert run.said[2] == undisturbed(list(range(20)), submit(2, [1]).sampling)


def test_the_state_used_last_stays() -> None:
    run = begin(stateful(kept_states=2))
    prompts = [[number] * 12 for number in range(3)]
    assert [ask(run, 1, prompts[0]), ask(run, 2, prompts[1]), ask(run, 3, prompts[0])] == [0, 0, 8]
    assert ask(run, 4, prompts[2]) == 0  # in the place of the second
    assert [ask(run, 5, prompts[0]), ask(run, 6, prompts[1])] == [8, 0]


def test_one_place_for_two_states_of_one_plan() -> None:
    run = begin(stateful(kept_states=1))
    for number in (1, 2):
        run.planner.submit(submit(number, [number] * 12), 0.0)
    next_step(run)
    assert pairs(next_step(run).kept) == [(0, 7)]
    run.finish()
    assert [ask(run, 3, [1] * 12), ask(run, 4, [2] * 12)] == [8, 0]


def test_a_state_without_its_pages_is_not_used() -> None:
    run = begin(stateful(num_pages=12))
    assert ask(run, 1, list(range(30)), max_tokens=1) == 0
    assert ask(run, 2, [7] * 40, max_tokens=2) == 0  # takes all pages
    assert ask(run, 3, list(range(30)), max_tokens=1) == 0
    assert ask(run, 4, list(range(30)), max_tokens=1) == 24
    assert run.worker.counts["kept"] == 2, "the state of the first was still there"  # type: ignore[attr-defined]


def test_who_leaves_between_the_cut_and_the_copy_leaves_no_state() -> None:
    run = begin(stateful())
    run.planner.submit(submit(1, list(range(20))), 0.0)
    next_step(run)
    run.planner.abort(Abort(np.array([1], np.int64).tobytes()))
    run.planner.submit(submit(2, [3] * 5), 0.0)
    assert next_step(run).kept == b""
    run.finish()
    assert ask(run, 3, list(range(20))) == 0


def test_new_workers_have_no_states() -> None:
    run = begin(stateful())
    assert ask(run, 1, list(range(20))) == 0
    restart(run)
    run.worker = StateWorker(run.settings)
    assert [ask(run, 2, list(range(20))), ask(run, 3, list(range(20)))] == [0, 16]


def test_whose_whole_prompt_is_asked_about_begins_from_nothing() -> None:
    run = begin(stateful())
    assert [ask(run, 1, list(range(20))), ask(run, 2, list(range(20)), prompt_logprobs=1)] == [0, 0]


@pytest.mark.parametrize(("length", "computed"), [(21, 21 + 4 * 5), (7, 5 * 7)])
def test_answers_to_one_prompt_begin_from_its_state(length: int, computed: int) -> None:
    """Not from its pages: the state of whoever runs has gone on. A prompt that leaves none is computed by each."""
    run = begin(stateful())
    request = several(1, list(range(length)), 5, max_tokens=9)
    run.planner.submit(request, 0.0)
    planned = 0
    while not run.planner.idle:
        if (step := run.planner.plan(0.0)) is not None:
            planned += sum(length for _, length in chunks(step))
            run.worker.issue(step)
        else:
            run.execute()
    run.finish()
    assert planned == computed
    assert run.said == singles(request)


def test_answers_do_not_wait_for_a_state_that_is_not_kept() -> None:
    run = begin(stateful(kept_states=0))
    run.planner.submit(several(1, list(range(20)), 3), 0.0)
    assert len(next_step(run).enter) == 3
    run.finish()


def test_nobody_begins_with_less_than_a_tile() -> None:
    """Unless that is all of it; and the one that is next in line holds its place."""
    run = begin(stateful(max_num_batched_tokens=14))
    for number, length in ((1, 12), (2, 20), (3, 5)):
        run.planner.submit(submit(number, [number] * length), 0.0)
    steps = [next_step(run), next_step(run)]
    run.finish()
    assert [chunks(step) for step in steps] == [[(0, 8)], [(8, 4), (0, 8)]]
    assert len(run.ended) == 3


def test_a_prompt_gets_on_beside_as_many_decodes_as_there_can_be() -> None:
    run = begin(stateful(max_num_seqs=6, max_num_batched_tokens=14, max_lease=1))
    for number in range(5):
        run.planner.submit(submit(number, [number], max_tokens=60), 0.0)
    next_step(run)
    run.execute()
    run.planner.submit(submit(9, [9] * 40), 0.0)
    run.planner.submit(submit(10, [9] * 3), 0.0)
    for start in range(0, 40, 8):
        step = next_step(run)
        run.execute()
        assert chunks(step) == [(start, 8)]
        assert len(step.decodes) == 4 * 5
    run.finish()


def test_settings_by_which_a_prompt_could_starve_are_refused() -> None:
    check_at_once(256, 320, 64, "says why")
    check_at_once(256, 256, 0, "says why")
    said = (
        r"--max-num-batched-tokens is 319; want at least 320: --max-num-seqs \(256\) and 64, since this model says why$"
    )
    with pytest.raises(ValueError, match=said):
        check_at_once(256, 319, 64, "says why")


@pytest.mark.parametrize(("tile", "caching", "kept"), [(64, True, 3), (64, False, 0), (0, True, 0)])
def test_states_are_kept_where_there_are_some_and_prefixes_are_cached(tile: int, caching: bool, kept: int) -> None:
    config = EngineConfig(model="tiny", enable_prefix_caching=caching, kept_states=3)
    joined = make_settings(config, Limits(100, 64, VOCABULARY, "float32", "cpu", 8, state_tile=tile))
    assert (joined.state_tile, joined.kept_states) == (tile, kept)


@pytest.mark.parametrize(("deterministic", "times"), [(False, 1), (True, 2)])
def test_who_is_sent_away_begins_from_its_own_state_again(deterministic: bool, times: int) -> None:
    run = begin(stateful(num_pages=20, max_lease=1, deterministic=deterministic))
    requests = [submit(number, [number] * 20, seed=number, max_tokens=30) for number in range(2)]
    for request in requests:
        run.planner.submit(request, 0.0)
    run.finish()
    load = run.planner.load()
    assert (load.num_preemptions, load.num_prefix_hits) == (times, 16 * times)
    assert run.worker.counts["restored"] == times  # type: ignore[attr-defined]
    for request in requests:
        assert run.said[request.number] == undisturbed([request.number] * 20, request.sampling)
