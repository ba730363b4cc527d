"""The planner against a simulated worker that checks every read: random loads, tiny pools, cancels, leases."""

import random
from collections import defaultdict

import numpy as np
import pytest
from msgspec.structs import replace

from simulated_worker import VOCABULARY, SimulatedWorker, undisturbed
from tercet.engine.planner import Planner
from tercet.engine.planner_settings import PlannerSettings
from tercet.engine.speculation import SpeculativeConfig
from tercet.ipc.step_messages import Abort, Ended, Sampling, Started, Submit, Unservable


def settings(**changes: object) -> PlannerSettings:
    base = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "max_model_len": 200,
        "num_pages": 40,
        "page_size": 4,
        "run_ahead": 2,
        "max_lease": 4,
        "enable_prefix_caching": True,
    }
    return PlannerSettings(**{**base, **changes})  # type: ignore[arg-type]


def tight_sizes(draw: random.Random) -> dict[str, int]:
    """Few slots, pages and tokens of a step: whatever can be in the way of a random load is."""
    return {
        "max_num_seqs": draw.choice([1, 3, 8]),
        "max_num_batched_tokens": draw.choice([8, 17, 64]),
        "num_pages": draw.choice([24, 30, 60]),
        "page_size": draw.choice([2, 4]),
        "run_ahead": draw.randint(1, 3),
        "max_lease": draw.choice([1, 2, 8]),
        "max_model_len": 44,
    }


def random_speculation(draw: random.Random) -> SpeculativeConfig:
    return SpeculativeConfig(
        num_speculative_tokens=draw.choice([1, 3, 7]), disable_by_batch_size=draw.choice([1, 2, 16])
    )  # fmt: skip


def submit(number: int, prompt: list[int], salt: str = "", **sampling: object) -> Submit:
    base = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "max_tokens": 5, "min_tokens": 0}
    stop_ids = np.array(sampling.pop("stops", []), np.int32).tobytes()
    return Submit(
        number,
        np.array(prompt, np.int32).tobytes(),
        Sampling(**{**base, **sampling}, stop_ids=stop_ids),
        salt,  # type: ignore[arg-type]
    )


class Run:
    """A planner and a worker, driven by hand; collects what the tokenizer would get."""

    def __init__(self, chosen: PlannerSettings) -> None:
        self.settings = chosen
        self.planner = Planner(chosen, b"key")
        self.worker = SimulatedWorker(
            chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens
        )
        self.said: dict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, Ended] = {}
        self.started: dict[int, Started] = {}

    def _always_try(self, most: int) -> None:
        self.planner._guessing._tries = True

    def plan(self) -> bool:
        # Nothing that such a worker says follows from what it has said, though its guesses may be right.
        self.planner._guessing._decide = self._always_try  # type: ignore[method-assign]
        step = self.planner.plan(0.0)
        if step is not None:
            if self.settings.deterministic:  # what is generated is never computed as part of a prompt
                assert all(enter.num_tokens == enter.num_prompt for enter in step.enter)
            self.worker.issue(step)
            assert self.worker.in_flight <= self.settings.run_ahead
        return step is not None

    def execute(self) -> None:
        tokens = self.planner.complete(self.worker.execute(), 1.0)
        if tokens is None:
            return
        for number, token in zip(
            np.frombuffer(tokens.numbers, np.int64).tolist(),
            np.frombuffer(tokens.token_ids, np.int32).tolist(),
            strict=True,
        ):
            assert number not in self.ended, "a token after the end"
            self.said[number].append(token)
        for started in tokens.started:
            assert started.number not in self.started, "started twice"
            self.started[started.number] = started
        for ended in tokens.ended:
            assert ended.number not in self.ended, "ended twice"
            self.ended[ended.number] = ended

    def finish(self) -> None:
        while True:
            planned = self.plan()
            if self.worker.in_flight:
                self.execute()
            elif not planned:
                break
        assert self.planner.idle, self.planner.load()
        assert self.planner.load().num_free_pages == self.settings.num_pages - 1


@pytest.mark.parametrize("seed", range(60))
def test_random_loads_say_what_undisturbed_requests_say(seed: int) -> None:
    draw = random.Random(seed)
    chosen = settings(
        **tight_sizes(draw),
        enable_prefix_caching=draw.random() < 0.8,
        deterministic=draw.random() < 0.4,
        speculation=draw.choice([None, random_speculation(draw)]),
    )
    run = Run(chosen)
    stems = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 16))] for _ in range(3)]
    requests: dict[int, Submit] = {}
    aborted: set[int] = set()
    for number in range(30):
        stem = draw.choice(stems)
        prompt = stem + [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 1, 3, 9]))]
        requests[number] = submit(
            number,
            prompt,
            salt=draw.choice(["", "", "other"]),
            adapter_load=draw.choice([-1, -1, 0, 1]),
            seed=draw.randrange(3),
            max_tokens=draw.randint(1, 18),
            min_tokens=draw.choice([0, 0, 4]),
            stops=[draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 2]))],
        )
    waiting = list(requests.values())
    while waiting or not run.planner.idle:
        action = draw.random()
        if waiting and action < 0.25:
            assert run.planner.submit(waiting.pop(0), 0.0) is None
        elif action < 0.30 and len(waiting) < len(requests):
            number = draw.randrange(len(requests) - len(waiting))
            if number not in run.ended:
                aborted.add(number)
            run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif action < 0.65:
            run.plan()
        elif run.worker.in_flight:
            run.execute()
    run.finish()
    for number, request in requests.items():
        want = undisturbed(np.frombuffer(request.prompt_ids, np.int32).tolist(), request.sampling)
        if number in aborted:
            assert number not in run.ended
            assert run.said[number] == want[: len(run.said[number])]
        else:
            assert run.said[number] == want
            assert (run.ended[number].reason == "length") == (run.ended[number].stop_id is None)
            assert run.ended[number].usage.num_generated_tokens == len(want)


def test_prefix_hits_partial_full_by_salt_and_by_adapter() -> None:
    run = Run(settings())
    prompt = list(range(16))
    asked = [(prompt, "", -1), (prompt, "", -1), ([*prompt[:9], 40], "", -1), (prompt, "secret", -1)]
    asked += [(prompt, "", 0), (prompt, "", 1), (prompt, "1", -1), (prompt, "", 1), (prompt, "secret", 1)]
    for number, (ids, salt, adapter) in enumerate(asked):
        run.planner.submit(submit(number, ids, salt, adapter_load=adapter), 0.0)
        run.finish()
    # A full hit still computes the last token, so its page is not taken from the cache.
    assert [run.ended[number].usage.num_cached_tokens for number in range(9)] == [0, 12, 8, 0, 0, 0, 0, 12, 0]


def test_equal_prompts_in_one_step_do_not_read_each_other() -> None:
    run = Run(settings(max_num_batched_tokens=64))
    for number in range(3):
        run.planner.submit(submit(number, list(range(12)), seed=number), 0.0)
    step = run.planner.plan(0.0)
    assert step is not None
    assert len(step.enter) == 3
    assert len(np.frombuffer(step.chunks, np.int32)) == 9
    pages = np.frombuffer(step.pages, np.int32).reshape(-1, 3)[:, 2].tolist()
    assert len(set(pages)) == len(pages)
    run.worker.issue(step)
    run.finish()
    assert [run.ended[number].usage.num_cached_tokens for number in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("deterministic", "num_cached"), [(False, 16), (True, 4)])
def test_generated_pages_serve_the_next_turn(deterministic: bool, num_cached: int) -> None:
    run = Run(settings(deterministic=deterministic))
    run.planner.submit(submit(0, list(range(6)), max_tokens=12), 0.0)
    run.finish()
    run.planner.submit(submit(1, [*range(6), *run.said[0], 3, 4]), 0.0)
    run.finish()
    # Of 18 known tokens, 17 were computed: four full pages. The prompt's own 6 fill one.
    assert run.ended[1].usage.num_cached_tokens == num_cached


def test_resubmitted_tokens_are_told_once() -> None:
    run = Run(settings(deterministic=True))
    request = submit(0, list(range(6)), max_tokens=12)
    want = undisturbed(list(range(6)), request.sampling)
    run.planner.submit(replace(request, generated_ids=np.array(want[:5], np.int32).tobytes()), 0.0)
    run.finish()
    assert run.said[0] == want[5:]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_resubmitted_request_starts_with_its_first_token_here(deterministic: bool) -> None:
    """Whether or not that one is told; no page is full by then."""
    run = Run(settings(deterministic=deterministic, page_size=64, run_ahead=1))
    request = submit(0, list(range(6)), max_tokens=12)
    generated = np.array(undisturbed(list(range(6)), request.sampling)[:5], np.int32).tobytes()
    run.planner.submit(replace(request, generated_ids=generated), 0.0)
    run.plan()
    run.execute()
    assert run.started == {0: Started(0, num_cached_tokens=0, queued_s=0.0, prefill_s=1.0)}
    assert len(run.said[0]) == (0 if deterministic else 1)
    run.finish()


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    planner = Planner(settings(num_pages=5), b"key")
    assert planner.submit(submit(1, [1] * 8, max_tokens=9), 0.0) is None
    refusal = planner.submit(submit(2, [1] * 8, max_tokens=10), 0.0)
    assert isinstance(refusal, Unservable)
    assert refusal.number == 2
    assert "17" in refusal.message
    assert "16" in refusal.message


def test_short_prompts_enter_beside_a_long_one() -> None:
    run = Run(settings(max_num_batched_tokens=16, num_pages=100))
    run.planner.submit(submit(0, list(range(40)) * 3), 0.0)
    run.plan()
    run.planner.submit(submit(1, [5, 6]), 0.0)
    while run.worker.in_flight:
        run.execute()
    step = run.planner.plan(0.0)
    assert step is not None
    chunks = np.frombuffer(step.chunks, np.int32).reshape(-1, 3)
    assert chunks[:, 2].tolist() == [8, 2]


def test_leases_only_while_nothing_waits() -> None:
    run = Run(settings(max_lease=8, run_ahead=1, max_num_seqs=1))
    run.planner.submit(submit(0, [1, 2], max_tokens=40), 0.0)
    counts = []
    for number in range(1, 5):
        step = run.planner.plan(0.0)
        assert step is not None
        counts.append(step.count)
        run.worker.issue(step)
        while run.worker.in_flight:
            run.execute()
        if number == 2:
            run.planner.submit(submit(1, [3], max_tokens=2), 0.0)
    assert counts == [1, 8, 1, 1]
    run.finish()


def test_a_lease_never_outlives_the_longest_request() -> None:
    run = Run(settings(max_lease=8, run_ahead=3))
    run.planner.submit(submit(0, [1, 2], max_tokens=4), 0.0)
    run.planner.submit(submit(1, [3], max_tokens=2), 0.0)
    assert run.plan()
    step = run.planner.plan(0.0)
    assert step is not None
    assert step.count == 3
    run.worker.issue(step)
    assert run.planner.plan(0.0) is None
    run.finish()


def test_a_running_request_shares_only_what_is_computed() -> None:
    """The newest token of a full page is known before its keys and values are there."""
    run = Run(settings(run_ahead=1, max_lease=1, num_pages=200, max_num_batched_tokens=64))
    run.planner.submit(submit(0, [1, 2, 3], max_tokens=40), 0.0)
    number = 0
    while not run.planner.idle:
        run.plan()
        run.execute()
        if 0 not in run.ended and len(run.said[0]) < 30:
            number += 1
            run.planner.submit(submit(number, [1, 2, 3, *run.said[0], 4, 4], max_tokens=1), 0.0)
    hits = [run.ended[one].usage.num_cached_tokens for one in range(1, number + 1)]
    assert max(hits) >= 24
