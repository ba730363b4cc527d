"""Several answers to one prompt, in the planner: each says what it would alone, and the prompt is computed once.

The worker is the simulated one: it checks every key and value that is read, and that a page has one writer.
"""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from simulated_worker import VOCABULARY, undisturbed
from tercet.engine.planner import Planner
from tercet.ipc.step_messages import Abort, Sibling, Submit
from test_engine_planner import Run, settings, submit, tight_sizes
from test_engine_planner_restart import prompt_of, restart


def several(number: int, prompt: list[int], n: int, **sampling: object) -> Submit:
    """Numbers and seeds count up."""
    first = submit(number, prompt, **sampling)  # type: ignore[arg-type]
    siblings = tuple(Sibling(number + i, first.sampling.seed + i) for i in range(1, n))
    return replace(first, siblings=siblings)


def singles(request: Submit) -> dict[int, list[int]]:
    """What each answer would say alone."""
    seeds = {request.number: request.sampling.seed, **{one.number: one.seed for one in request.siblings}}
    return {
        number: undisturbed(prompt_of(request), replace(request.sampling, seed=seed)) for number, seed in seeds.items()
    }


def chunks(run: Run) -> list[tuple[int, int, int]]:
    """Plan until nothing is left to do; returns every chunk that was planned."""
    planned = []
    while (step := run.planner.plan(0.0)) is not None or run.worker.in_flight:
        if step is not None:
            planned += [tuple(row) for row in np.frombuffer(step.chunks, np.int32).reshape(-1, 3).tolist()]
            run.worker.issue(step)
        else:
            run.execute()
    run.finish()
    return planned


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7, 8, 30])
@pytest.mark.parametrize("caching", [False, True])
def test_a_prompt_is_computed_once(caching: bool, length: int) -> None:
    run = Run(settings(enable_prefix_caching=caching, num_pages=80))
    request = several(1, list(range(length)), 5, salt="mine", max_tokens=9)
    run.planner.submit(request, 0.0)
    computed = chunks(run)
    assert sum(length for _, _, length in computed) == length + 4  # the last token once for each sibling
    assert run.said == singles(request)
    cached = [run.ended[number].usage.num_cached_tokens for number in range(1, 6)]
    assert cached == [0] + [length - 1] * 4
    assert run.planner.load().num_preemptions == 0


def test_pages_are_shared_but_the_last() -> None:
    """Eight answers to a prompt of ten pages and a half hold 10 pages together and a few each."""
    run = Run(settings(enable_prefix_caching=False, max_num_seqs=8, num_pages=40))
    run.planner.submit(several(1, list(range(42)), 8, max_tokens=6), 0.0)
    least = 40
    while not run.planner.idle:
        if not run.plan():
            run.execute()
        least = min(least, run.planner.load().num_free_pages)
    assert least == 39 - 10 - 8 * 2  # 42 + 6 tokens, of which the last is never computed: 12 pages
    assert run.planner.load().num_preemptions == 0


def test_more_answers_than_slots() -> None:
    """Those that come late copy from whoever still runs."""
    run = Run(settings(max_num_seqs=3, enable_prefix_caching=False))
    request = several(1, list(range(10)), 9, max_tokens=12, stops=list(range(0, VOCABULARY, 7)))
    run.planner.submit(request, 0.0)
    computed = chunks(run)
    assert len({len(said) for said in run.said.values()}) > 3
    assert sum(length for _, _, length in computed) == 10 + 8
    assert run.said == singles(request)


def test_siblings_hold_nobody_up_while_they_wait() -> None:
    run = Run(settings(max_num_batched_tokens=8, num_pages=100))
    run.planner.submit(several(1, list(range(60)), 4), 0.0)
    run.plan()
    run.planner.submit(submit(9, [5, 6]), 0.0)
    while 9 not in run.ended:
        if not run.plan():
            run.execute()
    assert not run.said[1], "the long prompt is not through yet"
    assert run.planner.load().num_waiting == 3
    run.finish()
    assert len(run.ended) == 5


@pytest.mark.parametrize("when", range(1, 6))
def test_another_takes_the_place_of_the_first(when: int) -> None:
    """The first is cancelled before, while or just after its prompt is computed."""
    run = Run(settings(max_num_batched_tokens=8, run_ahead=1, enable_prefix_caching=False))
    request = several(1, list(range(30)), 3, max_tokens=6)
    run.planner.submit(request, 0.0)
    for _ in range(when):
        run.plan()
        run.execute()
    run.planner.abort(Abort(np.array([1], np.int64).tobytes()))
    run.finish()
    want = singles(request)
    assert {number: run.said[number] for number in (2, 3)} == {number: want[number] for number in (2, 3)}


def test_only_the_first_tells_of_the_prompt() -> None:
    planner = Planner(settings(), b"key")
    planner.submit(several(1, [1, 2, 3], 3, prompt_logprobs=2, logprobs=1), 0.0)
    wanted = []
    for _ in range(2):
        step = planner.plan(0.0)
        assert step is not None
        wanted += [(enter.sampling.prompt_logprobs, enter.sampling.logprobs) for enter in step.enter]
    assert wanted == [(2, 1), (None, 1), (None, 1)]


def test_the_prompt_is_in_memory_once_while_its_answers_wait() -> None:
    """The queue's bound on tokens counts it once."""
    planner = Planner(settings(), b"key")
    planner.submit(several(1, list(range(100)), 50), 0.0)
    assert len({request.token_ids.ctypes.data for request in planner._waiting}) == 1


def test_the_line_counts_every_answer() -> None:
    planner = Planner(settings(max_num_seqs=2, max_queued_requests=3, max_queued_tokens=20), b"key")
    refusal = planner.submit(several(1, [1], 6), 0.0)
    assert refusal is not None
    assert (refusal.code, refusal.message[:23]) == ("invalid_request", "n is 6; want at most 5:")
    assert planner.submit(several(10, [1] * 8, 3), 0.0) is None
    refusal = planner.submit(several(20, [1], 3), 0.0)
    assert refusal is not None
    assert refusal.code == "overloaded"
    refusal = planner.submit(several(30, [1] * 10, 2), 0.0)  # 10 tokens wait, and 11 more would
    assert refusal is not None
    assert refusal.code == "overloaded"
    assert planner.submit(several(40, [1] * 9, 2), 0.0) is None


def test_a_request_whose_first_answer_has_begun_has_had_its_turn() -> None:
    run = Run(settings(max_num_seqs=1))
    run.planner.submit(replace(several(1, [1, 2], 3, max_tokens=3), queue_timeout=5.0), 0.0)
    run.planner.submit(replace(several(9, [1, 2], 2), queue_timeout=5.0), 0.0)
    run.plan()
    assert sorted(one.number for one in run.planner.expire(6.0)) == [9, 10]
    run.finish()
    assert sorted(run.ended) == [1, 2, 3]


def test_who_waited_for_a_scheduler_that_died_waits_for_the_rest() -> None:
    run = Run(settings(max_num_seqs=1))
    run.planner.submit(several(1, [1, 2], 1, max_tokens=3), 0.0)
    run.planner.submit(replace(several(9, [1, 2], 2), queue_timeout=5.0, waited=4.0), 0.0)
    run.planner.submit(replace(several(19, [1, 2], 1), queue_timeout=5.0), 0.0)
    run.plan()
    assert run.planner.expire(0.9) == []
    expired = run.planner.expire(1.1)
    assert sorted(one.number for one in expired) == [9, 10]
    assert {one.message for one in expired} == {"the request waited for its turn for queue_timeout, 5 s"}


@pytest.mark.parametrize("seed", range(60))
def test_random_loads_say_what_single_answers_say(seed: int) -> None:
    """Tiny pools, cancels of single answers, deaths of workers, requests alone among them."""
    draw = random.Random(seed)
    deterministic = draw.random() < 0.4
    run = Run(
        settings(
            **tight_sizes(draw),
            enable_prefix_caching=draw.random() < 0.5,
            deterministic=deterministic,
        )
    )
    stems = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 16))] for _ in range(2)]
    requests = [
        several(
            100 * i,
            draw.choice(stems) + [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 1, 3, 9]))],
            draw.choice([1, 2, 3, 7]),
            salt=draw.choice(["", "other"]),
            adapter_load=draw.choice([-1, 0]),
            seed=draw.randrange(3),
            max_tokens=draw.randint(1, 18),
            stops=[draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 2]))],
        )
        for i in range(12)
    ]
    want = {number: said for request in requests for number, said in singles(request).items()}
    waiting, aborted, deaths = list(requests), set[int](), 0
    while waiting or not run.planner.idle:
        action = draw.random()
        if waiting and action < 0.2:
            assert run.planner.submit(waiting.pop(0), 0.0) is None
        elif action < 0.24:
            number = draw.choice(list(want))
            if number not in run.ended and not any(number - number % 100 == one.number for one in waiting):
                aborted.add(number)
                run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif action < 0.245 and deaths < 4:
            deaths += 1
            assert restart(run) == []
        elif action < 0.65:
            run.plan()
        elif run.worker.in_flight:
            run.execute()
    run.finish()
    for number, said in want.items():
        if number in aborted:
            assert number not in run.ended
            assert run.said[number] == said[: len(run.said[number])]
        else:
            assert run.said[number] == said
            assert run.ended[number].usage.num_generated_tokens == len(said)


def test_answers_go_on_from_what_they_had() -> None:
    """As a new scheduler gets them: of three answers one has ended, one has begun."""
    for deterministic in (False, True):
        run = Run(settings(deterministic=deterministic))
        request = several(1, list(range(11)), 3, max_tokens=12)
        want = singles(request)
        begun = np.array(want[3][:7], np.int32).tobytes()
        run.planner.submit(replace(request, again=True, siblings=(Sibling(3, 3, begun),)), 0.0)
        run.finish()
        assert run.said == {1: want[1], 3: want[3][7:]}
