"""The worker's step loop in lulls: a little of what starting left out at a time, plans first, until nothing is left."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tercet.engine.worker import run_steps
from tercet.ipc.step_messages import Step


class End(Exception):
    """The script has come to its end."""


class Script:
    """Inbox, runner, answers and link at once: gives the plans of a script, and notes what the loop does."""

    def __init__(self, plans: str, lulls: int) -> None:
        """`plans`: "p" is a plan of one step, "-" a wait in vain; `lulls`: how often there is something to do."""
        self.plans = list(plans)
        self.lulls = lulls
        self.noted = ""
        self.waits: list[float] = []
        self.spec = SimpleNamespace(incarnation=0, config=SimpleNamespace(heartbeat_timeout=5.0))
        self.beat_seconds = 1.0

    def receive(self, timeout: float) -> Step | None:
        self.waits.append(timeout)
        if not self.plans:
            raise End
        return Step(1, 1, b"", (), b"", b"", b"") if self.plans.pop(0) == "p" else None

    def begin(self, step: Step) -> None:
        self.noted += "b"

    def launch(self, index: int) -> None:
        self.noted += "l"

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


@pytest.mark.parametrize(
    ("plans", "lulls", "noted"),
    [("ppp", 3, "bla" * 3), ("--p-p--", 3, "uublaubla"), ("p---", 1, "blau"), ("----", 9, "uuuu")],
)
def test_lulls(plans: str, lulls: int, noted: str) -> None:
    script = cast(Any, Script(plans, lulls))
    with pytest.raises(End):
        run_steps(script, script, script, script)
    assert script.noted == noted
    # It looks often while there is something to do, and then rests as long as it did before.
    assert script.waits[0] < 0.1
    assert (script.waits[-1] == script.beat_seconds) == (script.lulls <= 0)
