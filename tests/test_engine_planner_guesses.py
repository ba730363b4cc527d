"""Plans of steps that try tokens ahead: what they ask for, what comes of it, and when they pay."""

import numpy as np
import pytest

from simulated_worker import undisturbed
from tercet.engine.guessing import Guessing
from tercet.engine.plan_draft import InFlight
from tercet.engine.residents import Counters
from tercet.engine.speculation import SpeculativeConfig, speculative_config
from tercet.ipc.step_messages import Adjustments, Step
from test_engine_planner import Run, settings, submit

FOUR = SpeculativeConfig(num_speculative_tokens=4, disable_by_batch_size=2)


def test_a_request_takes_fewer_steps_and_says_the_same() -> None:
    run = Run(settings(speculation=FOUR, max_lease=1, max_num_seqs=2))
    requests = [submit(number, [1, 2, number], seed=number, max_tokens=60) for number in range(2)]
    for request in requests:
        run.planner.submit(request, 0.0)
    run.finish()
    for number, request in enumerate(requests):
        assert run.said[number] == undisturbed([1, 2, number], request.sampling)
    load = run.planner.load()
    assert load.num_steps < 50
    assert 0 < load.num_right_guesses < load.num_guesses <= 4 * load.num_trials
    assert load.num_steps + load.num_right_guesses >= 60


@pytest.mark.parametrize(
    "asked", [{"logprobs": 1}, {"adjustments": Adjustments(1.2)}, {"logprobs": 0}], ids=["logprobs", "penalty", "own"]
)
def test_nothing_is_tried_beside_who_is_asked_about(asked: dict[str, object]) -> None:
    run = Run(settings(speculation=FOUR))
    run.planner.submit(submit(0, [1, 2], max_tokens=40), 0.0)
    run.planner.submit(submit(1, [1, 3], max_tokens=8, **asked), 0.0)
    guesses: list[tuple[int, int]] = []
    while not run.planner.idle:
        step = run.planner.plan(0.0)
        if step is not None:
            guesses.append((len(np.frombuffer(step.decodes, np.int32)), step.num_guesses))
            run.worker.issue(step)
        else:
            run.execute()
    assert {number for rows, number in guesses if rows == 2} == {0}
    assert (1, 4) in guesses


def test_nothing_is_tried_in_steps_of_many_or_with_prompts() -> None:
    run = Run(settings(speculation=FOUR, max_num_batched_tokens=8))
    for number in range(4):
        run.planner.submit(submit(number, list(range(12)), max_tokens=4 + 6 * number), 0.0)
    while not run.planner.idle:
        step = run.planner.plan(0.0)
        if step is None:
            run.execute()
            continue
        run.worker.issue(step)
        if step.num_guesses:
            assert len(np.frombuffer(step.decodes, np.int32)) <= 2
            assert not step.chunks
    assert run.planner.load().num_guesses > 0


def test_nobody_is_sent_away_for_guesses() -> None:
    """Two requests that fit exactly, in a pool in which guesses of both would not."""
    run = Run(settings(speculation=FOUR, num_pages=9, page_size=4, max_model_len=16, enable_prefix_caching=False))
    for number in range(2):
        run.planner.submit(submit(number, [1, 2, 3, number], max_tokens=12), 0.0)
    run.finish()
    assert run.planner.load().num_preemptions == 0
    assert [len(run.said[number]) for number in range(2)] == [12, 12]


def test_all_tokens_go_to_workers_that_look_back() -> None:
    for speculation, firsts in ((None, [0, 12]), (FOUR, [0, 0])):
        run = Run(settings(speculation=speculation))
        entered = []
        for number in range(2):
            run.planner.submit(submit(number, list(range(14))), 0.0)
            step = run.planner.plan(0.0)
            assert step is not None
            entered += [enter.first for enter in step.enter]
            run.worker.issue(step)
            run.finish()
        assert entered == firsts


def _watch(guessing: Guessing, steps: int, *, trying: float, plain: float, tokens: int, start: float = 0.0) -> int:
    """Steps of one request that take so long and give so many tokens; returns how many of them tried."""
    now, tried = start, 0
    for step_id in range(steps):
        guesses = guessing.wanted(np.array([True]))
        now += trying if guesses else plain
        tried += guesses > 0
        step = Step(step_id, 1, b"", (), b"", b"", b"\0\0\0\0", num_guesses=guesses)
        ids = np.array([7] * tokens + [-2] * (5 - tokens) if guesses else [7], np.int32)
        guessing.completed(now, InFlight.of(step, np.zeros(1, np.int32)), ids, more_in_flight=True)
    return tried


def test_what_does_not_pay_is_tried_again_now_and_then() -> None:
    seldom = _watch(Guessing(FOUR, Counters()), 1000, trying=1.4, plain=1.0, tokens=1)
    assert 0 < seldom < 120
    assert _watch(Guessing(FOUR, Counters()), 1000, trying=1.4, plain=1.0, tokens=3) > 980
    guessing = Guessing(FOUR, Counters())
    _watch(guessing, 300, trying=4.0, plain=1.0, tokens=3)  # right, and still not worth it
    assert _watch(guessing, 300, trying=4.0, plain=1.0, tokens=3, start=2000.0) < 60
    assert _watch(guessing, 300, trying=1.2, plain=1.0, tokens=3, start=4000.0) > 200, "it has become so"


def test_guesses_are_counted() -> None:
    counters = Counters()
    assert _watch(Guessing(FOUR, counters), 14, trying=1.0, plain=1.0, tokens=3) == 10
    assert (counters.trials, counters.guesses, counters.right_guesses) == (10, 40, 20)
    Guessing(FOUR, counters).completed(
        1.0, InFlight.of(Step(0, 1, b"", (), b"", b"", bytes(8), num_guesses=4), np.zeros(2, np.int32)),
        np.array([7, -1, -1, -1, -1, 7, -2, -1, -1, -1], np.int32), more_in_flight=False,
    )  # fmt: skip
    assert (counters.trials, counters.guesses, counters.right_guesses) == (11, 41, 20)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "eagle", "num_speculative_tokens": 3}, ["'eagle'", "method"]),
        ({"method": "ngram"}, ["num_speculative_tokens"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens is 0", "1 to 15"]),
        ({"num_speculative_tokens": 16}, ["num_speculative_tokens is 16"]),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 5}, ["prompt_lookup_min is 5", "1 to 4"]),
        ({"num_speculative_tokens": 3, "prompt_lookup_max": 9}, ["prompt_lookup_max is 9", "1 to 8"]),
        ({"num_speculative_tokens": 3, "disable_by_batch_size": 0}, ["disable_by_batch_size is 0"]),
        ({"num_speculative_tokens": 3, "draft_model": "x"}, ["draft_model"]),
        ("ngram", ["'ngram'", "num_speculative_tokens"]),
    ],
)
def test_what_is_wrong_with_a_config_is_named(given: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        speculative_config(given)
    for word in ("--speculative-config", *words):
        assert word in str(caught.value)
