"""The step loop: it goes on planning in a flood of messages, takes thousands of cancels as one, and tells gauges."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simulated_worker import VOCABULARY
from tercet.engine import scheduler
from tercet.engine.awake_cores import AwakeCores
from tercet.engine.child import remove_sockets
from tercet.engine.planner import Planner
from tercet.engine.scheduler import StepLoop
from tercet.ipc.addresses import make_addresses
from tercet.ipc.process_messages import ExchangeWeights, Limits, WorkersRestarted
from tercet.ipc.sockets import Inbox
from tercet.ipc.step_messages import Abort, Forget, Load, ReadWeights, Step, ToScheduler, ToTokenizer, ToWorker
from test_engine_planner import settings, submit


class Flood(Inbox[ToScheduler]):
    """An inbox in which all of these are at once."""

    def __init__(self, messages: Iterable[ToScheduler]) -> None:
        self.left = list(messages)
        self.left.reverse()

    def receive(self, timeout: float | None = None) -> ToScheduler | None:
        return self.left.pop() if self.left else None


class CountingPlanner(Planner):
    num_aborts = 0

    def abort(self, message: Abort) -> None:
        self.num_aborts += 1
        super().abort(message)


@pytest.fixture
def link() -> Iterator[Any]:
    """As much of a supervisor's link as the loop asks for."""
    addresses = make_addresses(1)
    spec = SimpleNamespace(addresses=addresses, own=addresses.replicas[0], replica=0)
    yield SimpleNamespace(spec=spec, beat_seconds=1.0, subscribe=lambda put: None, beat=lambda count: None)
    remove_sockets(spec.addresses, front_doors=False)


def abort(number: int) -> Abort:
    return Abort(np.array([number], np.int64).tobytes())


def test_plans_go_on_in_a_flood(link: Any) -> None:
    worker = Inbox[Step](link.spec.own.workers[0], Step)
    inbox = Flood([submit(1, [1, 2, 3]), *[abort(0)] * 100_000])
    StepLoop(Planner(settings(), b"key"), link, AwakeCores(kept=False)).turn(inbox)
    assert inbox.left
    assert worker.receive(10) is not None
    worker.close()


def test_while_workers_read_weights_nothing_is_planned(link: Any) -> None:
    worker = Inbox[ToWorker](link.spec.own.workers[0], ToWorker)
    commands: list[Any] = []
    link.subscribe = commands.append
    chosen = settings()
    limits = Limits(chosen.num_pages, chosen.max_model_len, VOCABULARY, "float32", "cpu", 8)
    loop = StepLoop(Planner(chosen, b"key"), link, AwakeCores(kept=False))
    loop.turn(Flood([submit(1, [1, 2, 3])]))
    (obey,) = commands
    obey(ExchangeWeights(5, "/other"))
    loop.turn(Flood([submit(2, [4, 5, 6])]))
    loop.turn(Flood([]))
    while isinstance(message := worker.receive(10), Step):
        pass
    assert message == ReadWeights(5, 0, "/other")
    assert worker.receive(0.1) is None
    obey(WorkersRestarted(1, limits, None))
    loop.turn(Flood([]))
    step = worker.receive(10)
    assert isinstance(step, Step)
    assert (step.epoch, len(step.enter)) == (1, 2), "what ran runs again, and what came meanwhile with it"
    worker.close()


def test_many_cancels_are_one_walk_along_the_line(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_TAKING_SECONDS", 60.0)
    planner = CountingPlanner(settings(), b"key")
    loop = StepLoop(planner, link, AwakeCores(kept=False))
    loop.turn(Flood([*(submit(number, [1, 2, 3]) for number in range(20)), *map(abort, range(0, 20, 2))]))
    assert planner.num_aborts == 1
    load = planner.load()
    assert load.num_running + load.num_waiting == 10
    loop.turn(Flood([abort(1)]))
    assert planner.load().num_running + planner.load().num_waiting == 9


def test_a_new_tokenizer_is_told_the_gauges_of_an_engine_at_rest(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_LOAD_SECONDS", 0.0)
    tokenizer = Inbox[ToTokenizer](link.spec.addresses.tokenizer, ToTokenizer)
    loop = StepLoop(Planner(settings(), b"key"), link, AwakeCores(kept=False))
    loop.turn(Flood([]))
    told = tokenizer.receive(10)
    assert isinstance(told, Load)
    loop.turn(Flood([]))  # nothing is new
    loop.turn(Flood([Forget(7)]))
    assert tokenizer.receive(10) == told
    assert tokenizer.receive(0.1) is None
    tokenizer.close()
