"""The planner when workers have other weights: what was said stands, and is brought as a prompt is, now and later."""

import numpy as np
import pytest
from msgspec.structs import replace

from simulated_worker import VOCABULARY, SimulatedWorker
from tercet.engine.planner import Planner
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.process_messages import Limits, WorkersRestarted
from test_engine_planner import settings, submit


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_was_said_with_other_weights_is_not_generated_again(deterministic: bool) -> None:
    """They would say other things. What comes after that, with the same weights, is as ever."""
    chosen = settings(deterministic=deterministic, max_lease=1, run_ahead=1)
    planner, worker = Planner(chosen, b"key"), SimulatedWorker(*sizes_of(chosen))
    limits = Limits(chosen.num_pages, chosen.max_model_len, VOCABULARY, "float32", "cpu", 8)

    def entered(*, others: bool) -> dict[int, int]:
        """With how many tokens each comes back to new workers; each gets two more then."""
        nonlocal worker
        assert planner.restart(WorkersRestarted(planner.epoch + 1, limits, None, others), 0.0) == []
        worker = SimulatedWorker(*sizes_of(chosen))
        return run_on()

    def run_on() -> dict[int, int]:
        counts = {}
        for _ in range(2):
            step = planner.plan(0.0)
            assert step is not None
            counts |= {enter.sampling.seed: enter.num_tokens for enter in step.enter}
            worker.issue(step)
            planner.complete(worker.execute(), 1.0)
        return counts

    planner.submit(submit(0, [1, 2, 3], seed=0, max_tokens=30), 0.0)
    assert run_on() == {0: 3}
    assert entered(others=False) == {0: 3 if deterministic else 5}
    assert entered(others=True) == {0: 5 if deterministic else 7}
    planner.submit(submit(1, [4, 5], seed=1, max_tokens=30), 0.0)
    assert run_on() == {1: 2}
    assert entered(others=False) == {0: 9 if deterministic else 11, 1: 2 if deterministic else 4}
    known = np.array([7, 8, 9], np.int32).tobytes()
    planner.submit(replace(submit(2, [6], seed=2, max_tokens=30), generated_ids=known), 0.0)
    assert run_on() == {2: 4}


def sizes_of(chosen: PlannerSettings) -> tuple[int, int, int, int]:
    return chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens
