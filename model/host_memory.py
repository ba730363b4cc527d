"""Memory of the host that a GPU reads and writes where it is: taken and pinned beside the rest of a start.

The system has to find each of its pages and keep it in place, which takes longer than anything else in a start where
it is much: so a thread does it, piece by piece, while weights are read. Knows bytes; what lies there is the runner's
matter.
"""

import contextlib
import mmap
import threading
from math import prod

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.kv_cache import size_text
from tercet.model.parallel import Group

PIECE = 2**30
"""Bytes that are pinned at a time: meanwhile the rest of the process may have to wait for memory."""


class HostMemory:
    """`num_bytes`, zeros. On the CPU it takes what is written of it, as others do."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ValueError(f"{_wanted(num_bytes)}, and there is no room: {error.strerror}; want less") from None
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._num_pinned, self._error = 0, 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            with contextlib.suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # fewer to find
            self._thread = threading.Thread(target=self._pin, args=(device,), name="pinning", daemon=True)
            self._thread.start()

    def pages(self, config: ModelConfig, page_size: int, dtype: torch.dtype, group: Group) -> Tensor:
        """As many places for pages as every rank has room for, once the memory is there: [place, layer, k/v, kv head,
        token, dim]. ValueError where the system has too little, or this is too little for one."""
        num_layers, parts, _, *rest = config.cache_shape(1, page_size, group.size)
        shape = num_layers, parts, *rest
        page_bytes = prod(shape) * dtype.itemsize
        if not (num_places := group.min(len(self._bytes) // page_bytes)):
            page = f"a page of {page_size} tokens takes {size_text(page_bytes)}"
            raise ValueError(f"{_wanted(len(self._bytes))}, and {page}: want room for one at least, as in 64GiB")
        return self.places((num_places, *shape), dtype)

    def places(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first of the memory, once all of it is there. ValueError where the system has too little."""
        if self._thread is not None:
            self._thread.join()
            if self._num_pinned < len(self._bytes):
                pinned = f"{size_text(self._num_pinned)} could be pinned (CUDA error {self._error})"
                raise ValueError(f"{_wanted(len(self._bytes))}, of which {pinned}; want less")
        return self._bytes[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _pin(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        while (left := len(self._bytes) - self._num_pinned) and not self._error:
            first, size = self._bytes.data_ptr() + self._num_pinned, min(left, PIECE)
            self._error = int(torch.cuda.cudart().cudaHostRegister(first, size, 0))
            self._num_pinned += 0 if self._error else size


def _wanted(num_bytes: int) -> str:
    return f"--kv-offloading-size takes {size_text(num_bytes)} of the host's memory for each rank"
