"""However many long prompts are being computed, a short one starts within a step or two; a burst is not torn apart."""

import random

import numpy as np
import pytest

from tercet.engine.planner import Planner
from tercet.ipc.step_messages import Sampled, Step
from test_engine_planner import settings, submit

BUDGET = 256


def sampled(planner: Planner, step: Step, index: int) -> Sampled:
    """One token for each row that samples."""
    chunks = np.frombuffer(step.chunks, np.int32).reshape(-1, 3).tolist()
    ends = [start + length for _, start, length in chunks]
    requests = [planner._residents.at(slot) for slot, _, _ in chunks]
    of_chunks = [1 if r is None or end == len(r.token_ids) else -1 for r, end in zip(requests, ends, strict=True)]
    of_decodes = [1] * (len(step.decodes) // 4)
    return Sampled(step.step_id, index, np.array(of_decodes + of_chunks, np.int32).tobytes(), planner.epoch)


@pytest.mark.parametrize("num_long", [1, 4, 16])
def test_short_prompts_among_long_ones(num_long: int) -> None:
    draw = random.Random(num_long)
    planner = Planner(
        settings(
            max_num_seqs=64,
            max_num_batched_tokens=BUDGET,
            max_model_len=5000,
            num_pages=20_000,
            enable_prefix_caching=False,
        ),
        b"key",
    )
    for number in range(num_long):
        planner.submit(submit(number, [1] * 4000), 0.0)
    arrived: dict[int, int] = {}
    waited: dict[int, int] = {}
    long_ended: list[int] = []
    for step_number in range(num_long * 40 + 60):
        if draw.random() < 0.5 and step_number < num_long * 40:
            number = num_long + len(arrived)
            arrived[number] = step_number
            planner.submit(submit(number, [1] * draw.randint(2, 60)), 0.0)
        step = planner.plan(0.0)
        for index in range(step.count if step else 0):
            assert step is not None
            tokens = planner.complete(sampled(planner, step, index), 0.0)
            for one in tokens.started if tokens else ():
                if one.number < num_long:
                    long_ended.append(one.number)
                else:
                    waited[one.number] = step_number - arrived[one.number]
    assert set(waited) == set(arrived)
    assert max(waited.values()) <= 2
    assert sorted(long_ended) == list(range(num_long)), "a long prompt starved"


def planned(planner: Planner, now: float) -> tuple[int, int] | None:
    """Decodes and prompts of the next plan."""
    step = planner.plan(now)
    return None if step is None else (len(step.decodes) // 4, len(step.chunks) // 12)


@pytest.fixture
def long_prompts() -> Planner:
    """Has nothing in flight, and room for all."""
    return Planner(settings(max_num_batched_tokens=4096, max_model_len=1100, num_pages=2000), b"key")


def test_decodes_behind_long_prompts_wait_a_moment_for_more_prompts(long_prompts: Planner) -> None:
    long_prompts.submit(submit(1, [1] * 1024), 7.0)
    assert planned(long_prompts, 7.0) == (0, 1)
    assert planned(long_prompts, 7.0) is None
    assert long_prompts.wakes_at(7.0) == pytest.approx(7.001)
    long_prompts.submit(submit(2, [2] * 100), 7.0004)
    assert planned(long_prompts, 7.0004) == (1, 1), "what has come need not wait"


def test_decodes_behind_a_long_prompt_alone_wait_no_longer(long_prompts: Planner) -> None:
    long_prompts.submit(submit(1, [1] * 1024), 7.0)
    assert planned(long_prompts, 7.0) == (0, 1)
    assert long_prompts.wakes_at(7.0011) is None
    assert planned(long_prompts, 7.0011) == (1, 0)


def test_decodes_behind_a_short_prompt_do_not_wait(long_prompts: Planner) -> None:
    long_prompts.submit(submit(1, [1] * 1023), 7.0)
    assert planned(long_prompts, 7.0) == (0, 1)
    assert planned(long_prompts, 7.0) == (1, 0), "the worker might be done before the next plan is there"
