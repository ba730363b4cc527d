"""Random loads of a model that carries states: each is of the very tokens before it, whatever comes in the way.

Prompts share beginnings; pages, places and budgets are few; requests are cancelled and sent away, and workers die.
"""

import random
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from masked_run import MaskedRun, constrained
from simulated_worker import VOCABULARY
from state_worker import StateWorker
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Abort, Submit
from test_engine_planner import Run, random_speculation, settings
from test_engine_planner_families import several, singles
from test_engine_planner_restart import prompt_of, restart


def sizes(draw: random.Random) -> PlannerSettings:
    """Of everything too little, so that states and pages go, and requests are sent away."""
    num_seqs, tile = draw.choice([1, 3, 8]), draw.choice([2, 4, 6, 8])
    caching = draw.random() < 0.85
    return settings(
        state_tile=tile,
        kept_states=draw.choice([0, 1, 2, 3, 8, 30]) if caching else 0,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + tile + draw.choice([0, 0, 3, 11, 40]),
        num_pages=draw.choice([32, 36, 60]),
        page_size=draw.choice([2, 4]),
        run_ahead=draw.randint(1, 3),
        max_lease=draw.choice([1, 2, 8]),
        max_model_len=60,
        enable_prefix_caching=caching,
        deterministic=draw.random() < 0.4,
        speculation=draw.choice([None, random_speculation(draw)]),
    )


def random_prompt(draw: random.Random, stems: list[list[int]], run: Run, asked: dict[int, Submit]) -> list[int]:
    """One of few beginnings and an end of its own; or an earlier request, what it said, and more."""
    stem = draw.choice(stems)[: draw.choice([99, 99, draw.randint(1, 24)])]
    if asked and draw.random() < 0.4:
        earlier = draw.choice(list(asked.values()))
        stem = (prompt_of(earlier) + run.said[earlier.number])[:38]
    return stem + [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 1, 3]))]


def random_load(seed: int, *, dies: bool, constrains: bool) -> Counter[str]:
    """Requests that come and go, and workers that die, until all have ended; returns what happened how often."""
    draw = random.Random(seed)
    chosen = sizes(draw)
    run = MaskedRun(chosen) if constrains else Run(chosen)
    run.worker = StateWorker(chosen)
    counts = Counter[str]()
    stems = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 24))] for _ in range(3)]
    asked: dict[int, Submit] = {}
    want: dict[int, list[int]] = {}
    aborted: set[int] = set()
    left, deaths = 30, 4 * dies
    while left or not run.planner.idle:
        action = draw.random()
        if left and action < 0.2:
            left -= 1
            make = draw.choice([several, constrained]) if constrains else several
            message = make(
                100 * left,
                random_prompt(draw, stems, run, asked),
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
        elif action < 0.24 and want:
            number = draw.choice(list(want))
            if number not in run.ended:
                aborted.add(number)
                run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif action < 0.25 and deaths:
            deaths -= 1
            counts += run.worker.counts
            assert restart(run) == []
            run.worker = StateWorker(chosen)
            if isinstance(run, MaskedRun):
                run._rows.clear()
        elif isinstance(run, MaskedRun) and run.masks.asked and action < 0.5:
            run.answer(draw.randrange(len(run.masks.asked)))
        elif action < 0.65:
            run.plan()
        elif run.worker.can_execute:
            run.execute()
    run.finish()
    counts += run.worker.counts
    load = run.planner.load()
    right, wrong = load.num_right_guesses, load.num_guesses - load.num_right_guesses
    counts.update(preempted=load.num_preemptions, right=right, wrong=wrong)
    for number, said in want.items():
        if number in aborted:
            assert number not in run.ended
            assert run.said[number] == said[: len(run.said[number])]
        else:
            assert run.said[number] == said
    assert counts["restored"] == 0 or chosen.kept_states
    if not dies:
        assert (load.num_prefix_hits > 0) == (counts["restored"] > 0)
    return counts


@pytest.mark.parametrize("seed", range(120))
def test_every_state_is_of_the_tokens_before_it(seed: int) -> None:
    random_load(seed, dies=seed % 2 > 0, constrains=False)


@pytest.mark.parametrize("seed", range(30))
def test_every_state_is_of_the_tokens_before_it_beside_late_masks(seed: int) -> None:
    random_load(seed, dies=seed % 2 > 0, constrains=True)


def test_random_loads_have_all_that_can_go_wrong() -> None:
    counts = sum((random_load(seed, dies=False, constrains=False) for seed in range(1000, 1012)), Counter[str]())
    assert all(counts[what] >= 10 for what in ("kept", "restored", "evicted", "preempted", "right", "wrong")), counts
