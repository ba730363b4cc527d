"""The worker's step loop: plans, draws of those that await masks, and a little of what starting left out in lulls."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tercet.engine.worker_loop import run_steps
from tercet.ipc.step_messages import Draw, ReadWeights, Step


class End(Exception):
    """The script has come to its end."""


class Script:
    """All that the loop has, at once: gives the plans of a script, and notes what the loop does."""

    reads_weights = False

    def __init__(self, plans: str, lulls: int) -> None:
        """`plans`: "p" is a plan of one step, "w" one that awaits masks, "m" some of them, "d" the rest; "r" asks for
        other weights to be read; "-" is a wait in vain, "e" one at whose end they are read. `lulls`: how often there is
        something to do."""
        self.plans = list(plans)
        self.lulls = lulls
        self.noted = ""
        self.waits: list[float] = []
        self.spec = SimpleNamespace(incarnation=0, config=SimpleNamespace(heartbeat_timeout=5.0))
        self.beat_seconds = 1.0

    def receive(self, timeout: float) -> Step | Draw | ReadWeights | None:
        self.waits.append(timeout)
        if not self.plans:
            raise End
        match self.plans.pop(0):
            case "-":
                return None
            case "e":
                self.reads_weights = False
                return None
            case "r":
                return ReadWeights(1, 0, "/other")
            case "p" | "w" as kind:
                return Step(1, 1, b"", (), b"", b"", b"", awaits=kind == "w")
            case kind:
                return Draw(1, 0, b"", "", b"", more_come=kind == "m")

    def begin(self, step: Step) -> None:
        self.noted += "b"

    def launch(self, index: int) -> None:
        self.noted += "l"

    def launch_model(self) -> None:
        self.noted += "m"

    def tell_midway(self, step: Step, midway: None) -> None:
        self.noted += "t"

    def draw(self, draw: Draw) -> object:
        self.noted += "d"
        return None if draw.more_come else object()

    def use_lull(self) -> bool:
        self.lulls -= 1
        self.noted += "u"
        return self.lulls > 0

    def put(self, step: Step, index: int, landing: object) -> None:
        self.noted += "a"

    def overdue(self, seconds: float) -> bool:
        return False

    def beat(self, count: int) -> None:
        pass

    def patience(self, seconds: float) -> float:
        return seconds

    def work(self) -> None:
        pass

    def then(self, call: Callable[[], None]) -> None:
        assert self.reads_weights
        call()

    def read_weights(self, order: ReadWeights) -> None:
        self.noted += "r"


@pytest.mark.parametrize(
    ("plans", "lulls", "noted"),
    [
        ("ppp", 3, "bla" * 3),
        ("--p-p--", 3, "uublaubla"),
        ("p---", 1, "blau"),
        ("----", 9, "uuuu"),
        ("-r--e-p-----", 4, "uruublau"),
    ],
)
def test_lulls(plans: str, lulls: int, noted: str) -> None:
    script = cast(Any, Script(plans, lulls))
    with pytest.raises(End):
        run_steps(script, script, script, script, script)
    assert script.noted == noted
    # It looks often while there is something to do, and then rests as long as it did before.
    assert script.waits[0] < 0.1
    assert (script.waits[-1] == script.beat_seconds) == (script.lulls <= 0)


@pytest.mark.parametrize(
    ("plans", "noted"),
    [
        ("w-m-d-", "bmt" + "d" + "da" + "u"),
        ("wdp", "bmtda" + "bla"),
        ("w-p-", "bmt" + "bla" + "u"),
        ("wwd", "bmtbmtda"),
    ],
    ids=["early", "at once", "given up", "given up for another"],
)
def test_a_plan_that_awaits_masks(plans: str, noted: str) -> None:
    """Until its draw there is no lull, however long that takes. A new scheduler's plans come instead of it."""
    script = cast(Any, Script(plans, 9))
    with pytest.raises(End):
        run_steps(script, script, script, script, script)
    assert script.noted == noted


def test_a_draw_that_nothing_awaits() -> None:
    script = cast(Any, Script("pd", 9))
    with pytest.raises(AssertionError, match="step 1 is to draw, and awaits nothing"):
        run_steps(script, script, script, script, script)
