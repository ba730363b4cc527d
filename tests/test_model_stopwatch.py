"""The stopwatch tells device times in the host's clock, for hours, although the device's differences are floats.

The device here is a fake one whose events happen at times that the test knows; tests/test_engine_gpu.py has the real.
"""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tercet.model import stopwatch
from tercet.model.stopwatch import NoStopwatch, Stopwatch


class World:
    """A host clock, and a device that runs what it is given one after another."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000_000
        self.device_ns = 0
        """When the device will have done all it was given."""

    def event(self) -> Any:
        event = SimpleNamespace(at_ns=-1)

        def record() -> None:
            self.device_ns = event.at_ns = max(self.now_ns, self.device_ns)

        def elapsed_time(later: Any) -> float:
            assert min(event.at_ns, later.at_ns) >= 0, "not recorded yet"
            return float(np.float32((later.at_ns - event.at_ns) / 1e6))

        event.record, event.elapsed_time, event.synchronize = record, elapsed_time, lambda: None
        return event


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(stopwatch, "_event", world.event)
    monkeypatch.setattr(stopwatch.time, "monotonic_ns", lambda: world.now_ns)
    monkeypatch.setattr(stopwatch.torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    return world


def test_hours_of_steps_in_a_small_ring(world: World) -> None:
    rng, depth = random.Random(2), 6
    ends = [world.event() for _ in range(depth)]
    watch = Stopwatch(ends)
    waiting: list[tuple[int, int, int]] = []
    worst = 0
    for step in range(20_000):
        place = step % depth
        if len(waiting) == depth:
            oldest, begin_ns, end_ns = waiting.pop(0)
            got = watch.interval_ns(oldest)
            worst = max(worst, abs(got[0] - begin_ns), abs(got[1] - end_ns))
        watch.start(place)
        begin_ns = world.device_ns
        world.device_ns += rng.randrange(100_000, 2_000_000_000)
        ends[place].record()
        waiting.append((place, begin_ns, world.device_ns))
        world.now_ns = max(world.now_ns, begin_ns)  # the host is as far as the device, or ahead of it
    assert world.device_ns > 4 * 3600 * 10**9
    assert worst < 20_000, "off by 20 us after hours; one anchor for all would be off by a millisecond"


def test_without_one(world: World) -> None:
    NoStopwatch().start(3)
    assert NoStopwatch().interval_ns(3) == (0, 0)
