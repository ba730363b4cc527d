"""What a worker drives, whatever it is: a model's runner, a record around it, or one that computes nothing."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.ipc.beyond import Beyond
from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Draw, Step
from tercet.ipc.swap_messages import Swap


class Landing(Protocol):
    """The tokens of one step, on their way."""

    def wait(self) -> NDArray[np.int32]: ...

    def beyond(self) -> Beyond: ...


class Midway(Protocol):
    """A step that awaits masks, on its way to its draw."""

    def wait(self) -> None:
        """Until the device has come to it. Called once, by any thread."""
        ...


class PageSwaps(Protocol):
    """What copies pages and states beside a runner's steps, where there is memory of the host for them."""

    def precede(self, step: Step) -> None:
        """Before a plan begins."""
        ...

    def follow(self, step: Step) -> None:
        """When all of it is launched."""
        ...

    def make(self, swap: Swap) -> Midway:
        """Start copies, which are made when the result is there."""
        ...


class StepRunner(Protocol):
    """What the worker drives: a model's runner, or the null runner."""

    @property
    def limits(self) -> Limits: ...

    def begin(self, step: Step) -> None:
        """Apply what a plan changes, before its first step."""
        ...

    def launch(self, index: int) -> Landing:
        """Start step `index` of the plan's lease."""
        ...

    def launch_model(self) -> Midway:
        """Of a plan that awaits masks, start the step up to its draw, which `draw` starts."""
        ...

    def draw(self, draw: Draw) -> Landing | None:
        """Start what is left of a step that was launched and awaits masks. None while it awaits more of them."""
        ...

    def use_lull(self) -> bool:
        """Do a little of what some step would have to wait for; False once there is nothing left."""
        ...
