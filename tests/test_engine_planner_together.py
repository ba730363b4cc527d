"""All that requests may want of the planner, at once: grammars, several answers, priorities, timeouts, what they have.

The worker is the simulated one and masks are slow. Whenever nothing is left that could happen, a plan has to be made.
"""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from masked_run import MaskedRun
from simulated_worker import VOCABULARY
from tercet.ipc.step_messages import Abort, Sibling, Submit
from test_engine_planner import random_speculation, settings, submit, tight_sizes
from test_engine_planner_families import singles
from test_engine_planner_restart import restart


def numbers_of(request: Submit) -> list[int]:
    return [request.number, *(one.number for one in request.siblings)]


def random_request(draw: random.Random, number: int, stems: list[list[int]]) -> Submit:
    request = submit(
        number,
        draw.choice(stems) + [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 1, 3, 9]))],
        salt=draw.choice(["", "other"]),
        adapter_load=draw.choice([-1, 0]),
        seed=draw.randrange(3),
        max_tokens=draw.randint(1, 18),
        stops=[draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 2]))],
        grammar="a grammar" if draw.random() < 0.4 else None,
        prompt_logprobs=1 if draw.random() < 0.1 else None,
    )
    siblings = tuple(Sibling(number + i, request.sampling.seed + i) for i in range(1, draw.choice([1, 1, 1, 2, 3, 7])))
    return replace(
        request,
        siblings=siblings,
        priority=draw.choice([0, 0, 0, -1, 1]),
        queue_timeout=5.0 if draw.random() < 0.1 else None,
    )


def goes_on(draw: random.Random, request: Submit) -> Submit:
    """The same, from somewhere in its answers."""
    begun = {n: np.array(said[: draw.randrange(len(said))], np.int32).tobytes() for n, said in singles(request).items()}
    siblings = tuple(replace(one, generated_ids=begun[one.number]) for one in request.siblings)
    return replace(request, again=True, generated_ids=begun[request.number], siblings=siblings)


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_of_everything(seed: int) -> None:
    draw = random.Random(seed)
    guesses = draw.choice([None, random_speculation(draw)])
    run = MaskedRun(settings(**tight_sizes(draw), deterministic=draw.random() < 0.4, speculation=guesses))
    stems = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 16))] for _ in range(3)]
    requests = [random_request(draw, 100 * number, stems) for number in range(1, draw.choice([10, 25, 40]))]
    requests = [goes_on(draw, one) if draw.random() < 0.15 else one for one in requests]
    waiting, asked, gone, deaths = list(requests), list[int](), set[int](), 0
    while waiting or not run.planner.idle:
        action = draw.random()
        if waiting and action < 0.15:
            request = waiting.pop()
            assert run.planner.submit(request, 0.0) is None
            asked += numbers_of(request)
        elif action < 0.18 and asked:
            number = draw.choice(asked)
            gone |= {number} - set(run.ended)
            run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif action < 0.185 and deaths < 8:
            deaths += 1
            gone |= {one.number for one in restart(run, draw.choice([None, "a step failed"]))}
            run._rows.clear()
        elif action < 0.19:
            gone |= {one.number for one in run.planner.expire(6.0)}
        elif run.masks.asked and action < 0.45:
            why = "no token" if draw.random() < 0.03 else None
            gone.update(run.answer(draw.randrange(len(run.masks.asked)), why))
        elif action < 0.7:
            went_on = run.draw(late=draw.random() < 0.3) or run.plan()
            assert went_on or run.worker.can_execute or run.masks.asked or run.planner.idle, "nothing goes on"
        elif run.worker.can_execute:
            run.execute()
    run.finish()
    for request in requests:
        begun = {request.number: request.generated_ids, **{one.number: one.generated_ids for one in request.siblings}}
        for number, said in singles(request).items():
            rest = said[len(begun[number]) // 4 :]
            assert (number in run.ended) == (number not in gone)
            assert run.said[number] == (rest[: len(run.said[number])] if number in gone else rest)
