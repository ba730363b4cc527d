"""Encoding of images on a GPU: kernel by kernel the first time that one has its size, from then on as a CUDA graph.

An encoder launches some 250 kernels, and to launch them takes the host as long as a GPU takes for a million pixels.
Images often have the sizes of others: films' frames, screens, pages.
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.model.vision import Seen, Vision

_MOST = 32
"""Sizes that have a graph, those that were met last."""
_SIZES_MET = 1024


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    pixels_HW3: Tensor
    """What it reads."""
    seen: Seen
    """What it writes: another graph may write there, too."""
    tables: object
    """What it reads besides weights: not to go while it may run."""


class VisionGraphs:
    """Of one encoder, by one thread."""

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self._met: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._graphs: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def encode(self, pixels_HW3: Tensor) -> Seen:
        """As `Vision.encode`."""
        size = tuple(pixels_HW3.shape)
        if size not in self._graphs:
            if size not in self._met:
                self._met[size] = None
                if len(self._met) > _SIZES_MET:
                    self._met.popitem(last=False)
                return self._vision.encode(pixels_HW3)
            self._graphs[size] = self._captured(pixels_HW3)
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(size)
        graph, read_HW3, seen, _ = self._graphs[size]
        read_HW3.copy_(pixels_HW3)
        graph.replay()
        return Seen(_copied(seen.rows_NO), tuple(map(_copied, seen.deep)))

    def _captured(self, like_HW3: Tensor) -> _Captured:
        read_HW3, tables = torch.empty_like(like_HW3), self._vision.tables(like_HW3)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                seen = self._vision.encode(read_HW3)
            finally:
                graph.capture_end()
        return _Captured(graph, read_HW3, seen, tables)


def _copied(rows: Tensor) -> Tensor:
    return torch.empty_like(rows).copy_(rows)
