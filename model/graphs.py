"""CUDA graphs of whole steps, one for each shape, in one pool of memory.

Knows how to capture and replay a function of a shape; what the function does is the runner's matter. Graphs share
their memory: they are replayed one after another, on one stream, and leave nothing in it but their results.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tercet.model.step_shape import StepShape

_MOST_STAND_INS = 4
"""Steps of a shape that another's graph runs before it is worth one of its own."""

Progress = Callable[[int, int], None]
"""Called with graphs captured and graphs to capture."""


class StepGraphs:
    """Captured steps. Others are captured when they first run; ahead of that in a lull: `capture_one`; or, where
    another's graph stands in, beside steps that go on, by a thread: to capture takes as long as some tens of steps."""

    def __init__(self, run: Callable[[StepShape], Tensor | None]) -> None:
        """`run`: launches a step of a shape on the current stream, the same launches each time; it may return a result.

        It is captured whatever the step has in it, and is not run before: that would double the time. Any thread may
        call it.
        """
        self._run = run
        self._stream = torch.cuda.Stream()
        """Of all captures, and of nothing else: what one of them gives back of their memory is for its own stream."""
        self._aside: threading.Thread | None = None
        """It captures one that others stand in for."""
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self._later: dict[StepShape, int] = {}
        """Shapes that have no graph yet, in the order in which they get one, and how often another's stood in."""
        self._can_have_one: Callable[[StepShape], bool] = lambda shape: False
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, shapes: Sequence[StepShape], progress: Progress | None = None) -> None:
        """Capture each shape, on the current stream, which must not be the default one."""
        if progress is not None:
            progress(0, len(shapes))
        for shape in shapes:
            self._capture(shape)
            if progress is not None:
                progress(len(self._graphs), len(shapes))

    def capture_later(
        self, shapes: Sequence[StepShape], can_have_one: Callable[[StepShape], bool] = lambda shape: False
    ) -> None:
        """Leave these for lulls or their first step, and for its first step also what can have a graph; those that have
        one already keep it."""
        self._later.update(dict.fromkeys((shape for shape in shapes if shape not in self._graphs), 0))
        self._can_have_one = can_have_one

    def capture_one(self) -> bool:
        """Capture one of those left for later; False if there was none."""
        self._wait_aside()
        shape = next(iter(self._later), None)
        if shape is not None:
            self._capture_late(shape)
        return shape is not None

    def shape_to_run(self, shape: StepShape, stand_ins: Sequence[StepShape]) -> StepShape:
        """As which a step is to run: while its shape has no graph, as the first that has one of those that stand in."""
        stand_in = next((other for other in stand_ins if other in self._graphs), None)
        if shape in self._graphs or stand_in is None:
            return shape
        if shape in self._later:
            self._later[shape] += 1
            if self._later[shape] > _MOST_STAND_INS and not (self._aside and self._aside.is_alive()):
                self._begin_aside(shape)
        return stand_in

    def run(self, shape: StepShape) -> Tensor | None:
        """Replay a captured step, or launch it kernel by kernel. A result is to be used before the next step."""
        captured = self._graphs.get(shape)
        if captured is None and (shape in self._later or self._can_have_one(shape)):
            self._capture_late(shape)
            captured = self._graphs.get(shape)
        if captured is None:
            return self._run(shape)
        graph, result = captured
        graph.replay()
        return result

    def _capture(self, shape: StepShape) -> None:
        self._graphs[shape] = self._captured(shape)

    def _captured(self, shape: StepShape) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache before every capture. Relaxed:
            # kernels that are new are compiled and loaded on the way.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                result = self._run(shape)
            finally:
                graph.capture_end()
        _upload(graph)
        return graph, result

    def _capture_late(self, shape: StepShape) -> None:
        self._wait_aside()
        self._later.pop(shape, None)
        try:
            self._capture(shape)
        except RuntimeError as error:
            self._give_up(shape, error)

    def _begin_aside(self, shape: StepShape) -> None:
        """Capture this one beside steps that go on."""
        del self._later[shape]
        self._aside = threading.Thread(target=self._capture_aside, args=(shape,), name="capture", daemon=True)
        self._aside.start()

    def _capture_aside(self, shape: StepShape) -> None:
        try:
            with torch.cuda.stream(self._stream):
                captured = self._captured(shape)
                self._stream.synchronize()
            self._graphs[shape] = captured
        except RuntimeError as error:
            self._give_up(shape, error)

    def _wait_aside(self) -> None:
        """No two are captured at a time."""
        if self._aside is not None:
            self._aside.join()
            self._aside = None

    def _give_up(self, shape: StepShape, error: RuntimeError) -> None:
        """Steps go on without a graph if there is no memory for it, which starting would have ended at."""
        self._later.clear()
        self._can_have_one = lambda shape: False
        print(f"warning: steps like {shape} run without a CUDA graph: {error}", file=sys.stderr)


def _upload(graph: torch.cuda.CUDAGraph) -> None:
    """Send a graph to the device, by the driver's C interface: else its first replay does, and takes 0.25 ms longer."""
    stream = torch.cuda.current_stream().cuda_stream
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuGraphUpload(ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(stream))
