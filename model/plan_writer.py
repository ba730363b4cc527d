"""A plan's changes, from their run to the device: a graph's replay where they are few, a kernel's launch where many.

A replay costs the host a tenth of a launch, and a first token waits for it. Knows runs and sizes; what is in them is
`slots.py`'s matter.
"""

import torch

from tercet.model.slots import PlanBuffer
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.write_plan import RunSizes, write_plan, write_small_plan


class PlanWriter:
    """Writes what is in the run that was begun last."""

    def __init__(self, plan: PlanBuffer, base: int, table: SlotTable, num_pages: int) -> None:
        """`base`: where the headers of all runs are."""
        self._plan = plan
        self._base = base
        self._table = table
        self._num_pages = num_pages
        self._graphs: list[torch.cuda.CUDAGraph] = []
        """One for each run, once they are captured."""

    def write(self, sizes: RunSizes) -> None:
        """Of these sizes, as the run's header says too."""
        if self._graphs and sizes.are_small:
            self._graphs[self._plan.turn].replay()
        else:
            run_W = self._plan.runs[self._plan.turn]
            write_plan(run_W, self._plan.words_W, sizes, self._table, self._num_pages)
        self._plan.sent()

    def compile(self) -> None:
        """On a GPU, and before `capture`: a run of -1 changes nothing."""
        self._plan.begin()[:] = -1
        self.write(RunSizes(0, self._base, 0, 0, 0))

    def capture(self) -> None:
        """On the current stream, which must not be the default one."""
        torch.cuda.current_stream().synchronize()
        for run_W in self._plan.runs:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                write_small_plan(run_W, self._plan.words_W, self._base, self._table, self._num_pages)
            finally:
                graph.capture_end()
            self._graphs.append(graph)
