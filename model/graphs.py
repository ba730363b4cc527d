"""CUDA graphs of whole steps, one for each shape, in one pool of memory.

Knows how to capture and replay a function of a shape; what the function does is the runner's matter. Graphs share
their memory: they are replayed one after another, on one stream, and leave nothing in it for later.
"""

from collections.abc import Callable, Sequence

import torch

from tercet.model.step_shape import StepShape

Progress = Callable[[int, int], None]
"""Called with graphs captured and graphs to capture."""


class StepGraphs:
    """Captured steps."""

    def __init__(self, run: Callable[[StepShape], None]) -> None:
        """`run`: launches a step of a shape on the current stream, the same launches each time.

        It is called with nothing but padding in the step.
        """
        self._run = run
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, shapes: Sequence[StepShape], progress: Progress | None = None) -> None:
        """Capture each shape, on the current stream, which must not be the default one."""
        for shape in shapes:
            self._run(shape)  # compiles what is not compiled yet, which must not happen while capturing
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache before every capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(shape)
            finally:
                graph.capture_end()
            self._graphs[shape] = graph
            if progress is not None:
                progress(len(self._graphs), len(shapes))

    def replay(self, shape: StepShape) -> bool:
        """Launch a captured step; False without such a graph."""
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        graph.replay()
        return True
