"""The step loop in a flood of messages: it goes on planning, and thousands of cancels are one."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tercet.engine import scheduler
from tercet.engine.child import remove_sockets
from tercet.engine.planner import Planner
from tercet.engine.scheduler import StepLoop
from tercet.ipc.addresses import make_addresses
from tercet.ipc.sockets import Inbox
from tercet.ipc.step_messages import Abort, Step, ToScheduler
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
    spec = SimpleNamespace(addresses=make_addresses(1))
    yield SimpleNamespace(spec=spec, beat_seconds=1.0, subscribe=lambda put: None, beat=lambda count: None)
    remove_sockets(spec.addresses, front_doors=False)


def abort(number: int) -> Abort:
    return Abort(np.array([number], np.int64).tobytes())


def test_plans_go_on_in_a_flood(link: Any) -> None:
    worker = Inbox[Step](link.spec.addresses.workers[0], Step)
    inbox = Flood([submit(1, [1, 2, 3]), *[abort(0)] * 100_000])
    StepLoop(Planner(settings(), b"key"), link).turn(inbox)
    assert inbox.left
    assert worker.receive(10) is not None
    worker.close()


def test_many_cancels_are_one_walk_along_the_line(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_TAKING_SECONDS", 60.0)
    planner = CountingPlanner(settings(), b"key")
    loop = StepLoop(planner, link)
    loop.turn(Flood([*(submit(number, [1, 2, 3]) for number in range(20)), *map(abort, range(0, 20, 2))]))
    assert planner.num_aborts == 1
    load = planner.load()
    assert load.num_running + load.num_waiting == 10
    loop.turn(Flood([abort(1)]))
    assert planner.load().num_running + planner.load().num_waiting == 9
