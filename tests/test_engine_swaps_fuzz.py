"""Random loads with pages in the host's memory: each page that comes back is the one that left, whatever comes between.
So is each state, where a model carries some.

Prompts share beginnings and come back; pages, places and slots are few; requests are cancelled and sent away, and
workers die. Copies are made at once or as late as can be, and told of whenever it is.
"""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from masked_run import MaskedRun, constrained
from simulated_worker import VOCABULARY
from state_swap_worker import StateSwapRun
from swap_worker import SwapRun
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Abort, Submit
from test_engine_planner import random_speculation, settings, tight_sizes
from test_engine_planner_families import several, singles
from test_engine_planner_restart import prompt_of, restart


class MaskedSwapRun(SwapRun, MaskedRun):
    """With both."""

    draw = MaskedRun.draw
    answer = MaskedRun.answer


class MaskedStateSwapRun(StateSwapRun, MaskedRun):
    """With all three."""

    draw = MaskedRun.draw
    answer = MaskedRun.answer


RUNS = {  # by what a load has: states, grammars
    (False, False): SwapRun,
    (False, True): MaskedSwapRun,
    (True, False): StateSwapRun,
    (True, True): MaskedStateSwapRun,
}


def with_states(draw: random.Random, chosen: PlannerSettings) -> PlannerSettings:
    tile = draw.choice([2, 4, 8])
    return dataclasses.replace(
        chosen,
        state_tile=tile,
        kept_states=draw.choice([1, 2, 3, 8]),
        num_host_states=draw.choice([1, 2, 5, 50]),
        state_bytes=1000,
        max_num_batched_tokens=max(chosen.max_num_batched_tokens, chosen.max_num_seqs + tile),
    )


def random_load(seed: int, *, dies: bool, constrains: bool, carries: bool = False) -> Counter[str]:
    """Requests that come and go, and workers that die, until all have ended; returns what happened how often."""
    draw = random.Random(seed)
    chosen = settings(
        **{**tight_sizes(draw), "max_model_len": 60},
        num_host_pages=draw.choice([1, 4, 20, 40, 200]),
        page_bytes=7,
        deterministic=draw.random() < 0.4,
        speculation=draw.choice([None, random_speculation(draw)]),
    )
    chosen = with_states(draw, chosen) if carries else chosen
    run = RUNS[carries, constrains](chosen, lags=draw.random() < 0.5)
    stems = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 24))] for _ in range(4)]
    asked: dict[int, Submit] = {}
    want: dict[int, list[int]] = {}
    aborted: set[int] = set()
    counts = Counter[str]()
    left, deaths = 60, 3 * dies
    most_aborted = 8  # with many more, who waits in vain would end that way
    promptness = draw.choice([0.2, 0.5, 0.9])
    """With which copies are told of."""
    while left or not run.planner.idle:
        action = draw.random()
        if left and action < 0.2:
            left -= 1
            make = draw.choice([several, constrained]) if constrains else several
            stem = draw.choice(stems)
            if asked and draw.random() < 0.7:
                earlier = draw.choice(list(asked.values()))
                stem = (prompt_of(earlier) + run.said[earlier.number])[:26]
            message = make(
                100 * left,
                stem + [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 1, 3]))],
                **({"n": draw.choice([1, 1, 1, 2, 4])} if make is several else {}),
                adapter_load=draw.choice([-1, -1, -1, 0]),
                seed=draw.randrange(3),
                max_tokens=draw.randint(1, 18),
                stops=[draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 2]))],
                prompt_logprobs=draw.choice([None, None, None, 1]),
            )
            message = replace(message, cache_salt=draw.choice(["", "", "", "other"]), priority=draw.choice([0, 0, 1]))
            asked[message.number] = message
            want |= singles(message)
            assert run.planner.submit(message, 0.0) is None
        elif action < 0.24 and want and len(aborted) < most_aborted:
            number = draw.choice(list(want))
            if number not in run.ended:
                aborted.add(number)
                run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif action < 0.25 and deaths:
            deaths -= 1
            counts += run.worker.counts
            assert restart(run) == []
            run.begin_worker()
            if isinstance(run, MaskedRun):
                run._rows.clear()
        elif isinstance(run, MaskedRun) and run.masks.asked and action < 0.4:
            run.answer(draw.randrange(len(run.masks.asked)))
        elif action < 0.5 and draw.random() < promptness and run.worker.swaps:
            run.tell()
        elif action < 0.6:
            run.swap()
        elif action < 0.7 and isinstance(run, MaskedRun) and run.draw(late=draw.random() < 0.3):
            pass
        elif action < 0.85:
            run.plan()
        elif run.worker.can_execute:
            run.execute()
        elif run.worker.swaps and not run.planner.idle and draw.random() < 0.2:
            run.tell()
    run.finish()
    counts += run.worker.counts
    load = run.planner.load()
    counts.update(preempted=load.num_preemptions, hits=load.num_host_hits)
    assert load.num_host_hits <= load.num_prefix_hits <= load.num_prefix_queries
    assert load.num_loaded_bytes == 7 * counts["loaded"] + 1000 * counts["loaded states"] or dies
    for number, said in want.items():
        if number in aborted:
            assert number not in run.ended
            assert run.said[number] == said[: len(run.said[number])]
        else:
            assert run.said[number] == said
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_every_page_that_comes_back_is_the_one_that_left(seed: int) -> None:
    random_load(seed, dies=seed % 2 > 0, constrains=False)


@pytest.mark.parametrize("seed", range(6))
def test_every_page_that_comes_back_is_the_one_that_left_beside_late_masks(seed: int) -> None:
    random_load(seed, dies=seed % 2 > 0, constrains=True)


@pytest.mark.parametrize("seed", range(12))
def test_every_state_that_comes_back_is_the_one_that_left(seed: int) -> None:
    random_load(seed, dies=seed % 4 == 1, constrains=seed % 4 == 2, carries=True)


@pytest.mark.long
def test_many_more_loads() -> None:
    for seed in range(2000, 2500):
        random_load(seed, dies=seed % 2 > 0, constrains=seed % 4 > 1, carries=seed % 8 > 3)


@pytest.mark.parametrize("carries", [False, True])
def test_random_loads_have_all_that_can_go_wrong(carries: bool) -> None:
    loads = (random_load(seed, dies=False, constrains=False, carries=carries) for seed in range(1000, 1006))
    counts = sum(loads, Counter[str]())
    assert all(counts[what] >= 50 for what in ("stored", "loaded", "hits", "preempted", "swaps")), counts
    of_states = ("stored states", "loaded states", "kept", "restored", "evicted")
    assert not carries or all(counts[what] >= 10 for what in of_states), counts
