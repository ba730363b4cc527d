"""A worker's runner with a recorder around it: when plans began, when steps were launched, when the device ran them.

Wraps what the step loop drives, so that the loop is the same with and without. Knows no model.
"""

import numpy as np
from numpy.typing import NDArray

from tercet.engine.child import ChildSpec
from tercet.engine.step_runner import Landing, Midway, StepRunner
from tercet.engine.trace import Lane, Span, open_lanes, record_collections
from tercet.ipc.beyond import Beyond
from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Draw, Step


class TracedRunner:
    """A runner that leaves a record."""

    def __init__(self, runner: StepRunner, spec: ChildSpec) -> None:
        self._runner = runner
        self._lane, self._device, self._answers, garbage = open_lanes(
            spec.config.trace_dir or "", spec.lane, "launch", "device", "answers", "garbage"
        )
        record_collections(garbage)
        self._step_id, self._kind = 0, Span.DECODE
        self._begin_ns = 0
        """When the step was launched that is drawn next."""

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    def begin(self, step: Step) -> None:
        begin_ns = self._lane.now()
        self._runner.begin(step)
        self._step_id, self._kind = step.step_id, Span.PREFILL if step.chunks else Span.DECODE
        self._lane.end(Span.BEGIN, begin_ns, step.step_id, step.count)

    def launch(self, index: int) -> Landing:
        begin_ns = self._lane.now()
        landing = self._runner.launch(index)
        self._lane.end(Span.LAUNCH, begin_ns, self._step_id, index)
        return self._traced(landing, begin_ns)

    def launch_model(self) -> Midway:
        self._begin_ns = self._lane.now()
        midway = self._runner.launch_model()
        self._lane.end(Span.LAUNCH, self._begin_ns, self._step_id)
        return midway

    def draw(self, draw: Draw) -> Landing | None:
        begin_ns = self._lane.now()
        landing = self._runner.draw(draw)
        self._lane.end(Span.LAUNCH, begin_ns, self._step_id)
        return None if landing is None else self._traced(landing, self._begin_ns)

    def _traced(self, landing: Landing, begin_ns: int) -> Landing:
        span = begin_ns, self._lane.now()
        return _TracedLanding(landing, self._step_id, self._kind, span, self._answers, self._device)

    def use_lull(self) -> bool:
        return self._runner.use_lull()


class _TracedLanding:
    """Records the step when its tokens are there; only then is it known when a device ran it."""

    def __init__(
        self, landing: Landing, step_id: int, kind: Span, launched_ns: tuple[int, int], answers: Lane, device: Lane
    ) -> None:
        self._landing = landing
        self._step_id = step_id
        self._kind = kind
        self._launched_ns = launched_ns
        self._answers = answers
        self._device = device

    def wait(self) -> NDArray[np.int32]:
        begin_ns = self._answers.now()
        token_ids = self._landing.wait()
        self._answers.end(Span.AWAIT, begin_ns, self._step_id)
        # A landing that nobody times was computed while it was launched.
        interval_ns: tuple[int, int] = getattr(self._landing, "interval_ns", self._launched_ns)
        self._device.add(self._kind, *interval_ns, self._step_id, len(token_ids))
        return token_ids

    def beyond(self) -> Beyond:
        return self._landing.beyond()
