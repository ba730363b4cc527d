"""Times a launch as a step sees it: inside a CUDA graph, over inputs that rotate past the L2 cache.

Knows a GPU and a stopwatch; knows no kernel.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

ROTATED_BYTES = 150 << 20
_POOL_BYTES = 3 << 30


class Stopwatch:
    """A pool of random numbers from which inputs are cut, and graphs that are replayed."""

    def __init__(self) -> None:
        torch.manual_seed(time.time_ns() % 2**31)
        self._pool = torch.empty(_POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
        self._stream = torch.cuda.Stream()

    def cut(self, offset: int, *shape: int) -> Tensor:
        """Random bf16 numbers from somewhere in the pool: not to be written."""
        size = torch.Size(shape).numel()
        offset %= self._pool.numel() - size
        return self._pool[offset // 64 * 64 :][:size].view(shape)

    def copies(self, num_bytes: int) -> int:
        """How many inputs of a size outgrow the L2 cache together."""
        return min(max(ROTATED_BYTES // num_bytes + 1, 2), 32)

    def rotation(self, *shape: int) -> list[Tensor]:
        """Tensors of one shape that outgrow the L2 cache together."""
        size = torch.Size(shape).numel()
        return [self.cut(index * (size + 512), *shape) for index in range(self.copies(size * 2))]

    def microseconds(self, run: Callable[[int], object], copies: int, nodes: int = 24) -> float:
        """The median over replays of a graph that holds `run(0)` .. `run(copies - 1)` in turn, about `nodes` in all."""
        run(0)
        torch.cuda.synchronize()
        nodes = copies * max(1, nodes // copies)
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: it collects garbage each time, which takes longer than all the rest.
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            for index in range(nodes):
                run(index % copies)
            graph.capture_end()
        graph.replay()
        times = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) * 1e3 / nodes)
        return sorted(times)[3]
