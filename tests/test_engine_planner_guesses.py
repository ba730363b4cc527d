"""Plans of steps that try tokens ahead: what they ask for, what comes of it, and when they pay."""

import numpy as np
import pytest

from simulated_worker import undisturbed
from tercet.engine.counters import Counters
from tercet.engine.guessing import Guessing, follows
from tercet.engine.plan_draft import InFlight
from tercet.engine.slot_arrays import SlotArrays
from tercet.engine.speculation import SpeculativeConfig, speculative_config
from tercet.ipc.step_messages import Step
from test_engine_planner import Run, settings, submit
from test_triton_kernels_guess import plain_guesses

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


def test_nothing_is_tried_in_steps_of_many_or_with_prompts() -> None:
    run = Run(settings(speculation=FOUR, max_num_batched_tokens=8))
    for number in range(4):
        run.planner.submit(submit(number, list(range(12)), max_tokens=4 + 6 * number), 0.0)
    while not run.planner.idle:
        if not run.plan():
            run.execute()
            continue
        step = run.worker._queue[-1][0]
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


class Watched:
    """Steps of one request, of which time and tokens are as told; what it says repeats itself or does not."""

    def __init__(self) -> None:
        self.slots, self.counters = SlotArrays(1, 20_000), Counters()
        self.slots.alive[0] = True
        self._guessing = Guessing(FOUR, self.slots, self.counters)
        self._step_id = 0

    def run(self, steps: int, *, repeats: bool, trying: float = 1.4, plain: float = 1.0, tokens: int = 3) -> int:
        """Returns how many steps tried; of those so many `tokens` hold, if it repeats itself. `trying`, `plain`: what a
        step takes."""
        tried = 0
        for _ in range(steps):
            guesses = self._guessing.wanted(np.zeros(1, np.int32))
            tried += guesses > 0
            kept = tokens if guesses and repeats else 1
            for _ in range(kept):
                known = int(self.slots.known[0])
                self.slots.tokens[0, known] = known % 5 if repeats else known + 100
                self.slots.known[0] += 1
            ids = np.array([7] * kept + [-2] * (5 - kept) if guesses else [7], np.int32)
            step = Step(self._step_id, 1, b"", (), b"", b"", bytes(4), num_guesses=guesses)
            self._guessing.completed(InFlight.of(step, np.zeros(1, np.int32)), ids, trying if guesses else plain)
            self._step_id += 1
        return tried


def test_tries_follow_what_would_come_of_them() -> None:
    watched = Watched()
    assert watched.run(500, repeats=False) == 0
    assert watched.run(500, repeats=True) > 450
    assert watched.run(500, repeats=False) < 40
    assert watched.run(500, repeats=True) > 450


def test_steps_that_take_too_long_for_it_are_given_up() -> None:
    watched = Watched()
    assert watched.run(500, repeats=True, trying=4.0) < 250, "three tokens, in the time of four"
    assert watched.run(500, repeats=True, trying=4.0) < 250
    assert watched.run(2000, repeats=True, trying=1.2) > 1500, "it has become so"


def test_a_step_that_stood_still_is_not_believed_for_ever() -> None:
    """It may have waited for a graph of its own, or for a stopped process."""
    watched = Watched()
    watched.run(100, repeats=True)
    assert watched.run(1, repeats=True, trying=100.0) == 1
    assert watched.run(1000, repeats=True) > 600


def test_plain_steps_that_stood_still_are_no_reason_to_try() -> None:
    watched = Watched()
    assert watched.run(50, repeats=True) > 0
    watched.run(50, repeats=False)
    assert watched.run(1, repeats=False, plain=100.0) == 0
    assert watched.run(1000, repeats=False) < 40


def test_guesses_are_counted() -> None:
    watched = Watched()
    tried = watched.run(100, repeats=True)
    counters = watched.counters
    assert (counters.trials, counters.guesses, counters.right_guesses) == (tried, 4 * tried, 2 * tried)
    Guessing(FOUR, watched.slots, counters).completed(
        InFlight.of(Step(0, 1, b"", (), b"", b"", bytes(8), num_guesses=4), np.zeros(2, np.int32)),
        np.array([7, -1, -1, -1, -1, 7, -2, -1, -1, -1], np.int32), None,
    )  # fmt: skip
    assert (counters.trials, counters.guesses) == (tried + 1, 4 * tried + 1)
    assert counters.right_guesses == 2 * tried


@pytest.mark.parametrize("seed", range(20))
def test_what_follows_is_what_workers_find(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        shortest = int(rng.integers(1, 4))
        repeated = shortest, int(rng.integers(shortest, 6))
        tokens = rng.integers(0, 3, int(rng.integers(0, 40)), np.int32)
        wanted = plain_guesses(tokens.tolist(), 1, repeated)
        assert follows(tokens, *repeated) == (wanted[0] if wanted else None)


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
