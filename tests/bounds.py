"""In Triton's interpreter: every address that a kernel reads or writes lies in a tensor that it was given.

The memory checker of a machine with no GPU: `check_bounds()` makes any other access an error, with the kernel's name.
"""

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

_begin = itemgetter(0)


class _CheckedMemory:
    """Stands in for the interpreter's own access to memory."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._kernel = ""
        self._spans: list[list[int]] = []
        self._begins = self._ends = np.zeros(0, np.uint64)

    def enter(self, kernel: str, arguments: Iterable[object]) -> None:
        """From now on a kernel may touch these tensors."""
        spans = sorted(span for argument in arguments for span in _spans(argument))
        merged: list[list[int]] = []
        for begin, end in spans:
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self._kernel, self._spans = kernel, merged
        self._begins, self._ends = np.array(merged, np.uint64).reshape(-1, 2).T

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(ptrs, mask, np.dtype(dtype).itemsize, "reads")
        return self._memory.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self._check(ptrs, mask, value.dtype.itemsize, "writes")
        return self._memory.store(ptrs, value, mask)

    def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check(ptrs, mask, value.dtype.itemsize, "writes")
        return self._memory.atomic_rmw(op, ptrs, value, mask, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _check(self, ptrs: NDArray[np.uint64], mask: Any, size: int, what: str) -> None:
        used = ptrs[np.asarray(mask, bool)]  # masks come as integers too
        if not used.size:
            return
        first, last = int(used.min()), int(used.max())
        at = bisect_right(self._spans, first, key=_begin) - 1
        if at >= 0 and last + size <= self._spans[at][1]:  # in one of them all, as nearly always
            return
        span = np.searchsorted(self._begins, used, side="right").astype(np.int64) - 1
        inside = (span >= 0) & (used + np.uint64(size) <= self._ends[np.maximum(span, 0)])
        assert inside.all(), f"{self._kernel} {what} {int((~inside).sum())} numbers outside of what it was given"


def _spans(argument: object) -> list[tuple[int, int]]:
    """First address of a tensor, and the one behind its last."""
    if isinstance(argument, TensorDescriptor):
        return _spans(argument.base)
    if isinstance(argument, tuple):
        return [span for element in argument for span in _spans(element)]
    if not isinstance(argument, torch.Tensor) or not argument.numel():
        return []
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    return [(argument.data_ptr(), argument.data_ptr() + (last + 1) * argument.itemsize)]


def check_bounds() -> None:
    """Check all kernels that are interpreted from here on in this process."""
    memory = _CheckedMemory(interpreter._interpreter)
    interpreter._interpreter = memory
    run = interpreter.GridExecutor.__call__

    def checked_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        memory.enter(self.fn.__name__, (*args, *kwargs.values()))
        return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = checked_run
