"""PROCESS worker: one rank of the model. It runs the plans it is sent, in order, and answers with tokens (rank 0).

The only file of the engine that knows the model. It knows no text, no request, and no policy about pages.
"""

import queue
import threading
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.engine import child
from tercet.engine.child import SupervisorLink
from tercet.engine.errors import UnsupportedModel
from tercet.engine.null_runner import NullRunner
from tercet.ipc.messages import Beat, Limits, Loaded, Phase, Sampled, Serving, Step, ToScheduler, ToWorker
from tercet.ipc.sockets import Inbox, Outbox

_BEAT_SECONDS = 1.0


class Landing(Protocol):
    """The tokens of one step, on their way."""

    def wait(self) -> NDArray[np.int32]: ...


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


class Answers(threading.Thread):
    """Waits for landings in launch order and sends them, so that the step loop never waits for the device."""

    def __init__(self, address: str) -> None:
        super().__init__(name="answers", daemon=True)
        self._address = address
        self._landings: queue.SimpleQueue[tuple[int, int, Landing]] = queue.SimpleQueue()
        self.failure: BaseException | None = None

    def put(self, step_id: int, index: int, landing: Landing) -> None:
        if self.failure is not None:
            raise self.failure
        self._landings.put((step_id, index, landing))

    def run(self) -> None:
        try:
            scheduler: Outbox[ToScheduler] = Outbox(self._address)
            while True:
                step_id, index, landing = self._landings.get()
                scheduler.send(Sampled(step_id, index, landing.wait().tobytes()))
        except BaseException as error:  # told to the step loop, which ends the process
            self.failure = error
            raise
