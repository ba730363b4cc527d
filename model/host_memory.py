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

from tercet.model.kv_cache import size_text

PIECE = 2**30
"""Bytes that are pinned at a time: meanwhile the rest of the process may have to wait for memory."""


class HostMemory:
    """`num_bytes`, zeros. On the CPU it takes what is written of it, as others do."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ValueError(f"{self.wanted}, and there is no room: {error.strerror}; want less") from None
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._num_pinned, self._error = 0, 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            with contextlib.suppress(OSError):  # a system without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # fewer to find
            self._thread = threading.Thread(target=self._pin, args=(device,), name="pinning", daemon=True)
            self._thread.start()

    @property
    def wanted(self) -> str:
        """How errors begin."""
        return f"--kv-offloading-size takes {size_text(self.num_bytes)} of the host's memory for each rank"

    def places(self, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
        """What of it begins with byte `first`, once all of it is there. ValueError where the system has too little."""
        if self._thread is not None:
            self._thread.join()
            if self._num_pinned < self.num_bytes:
                pinned = f"{size_text(self._num_pinned)} could be pinned (CUDA error {self._error})"
                raise ValueError(f"{self.wanted}, of which {pinned}; want less")
        return self._bytes[first : first + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _pin(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        while (left := self.num_bytes - self._num_pinned) and not self._error:
            first, size = self._bytes.data_ptr() + self._num_pinned, min(left, PIECE)
            self._error = int(torch.cuda.cudart().cudaHostRegister(first, size, 0))
            self._num_pinned += 0 if self._error else size
