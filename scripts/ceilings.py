"""What a card can do at most: bytes a second of a large copy, operations a second of a large product.

Each is the best of several ways to do it, each in a graph and measured several times: a slow way must not make our
kernels look close to the ceiling. (A copy that a graph gives to the copy engines is one: 2.8 TB/s, a kernel 4.2.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_timing import Stopwatch

_COPIED = 2**29
"""Numbers in bf16: 1 GiB is read and 1 GiB is written, twenty times the L2 cache each."""
_SIDE = 8192
_REPEATS = 3


@dataclass(frozen=True)
class Ceilings:
    bytes_per_s: float
    """Read and written."""
    flops_per_s: float
    copies: dict[str, float]
    """Bytes a second of each way to copy."""


@triton.jit
def _copy_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr):
    """Grid (numbers / BLOCK,): one program copies BLOCK numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


def measure_ceilings(stopwatch: Stopwatch) -> Ceilings:
    source = stopwatch.cut(0, _COPIED)
    target = torch.empty_like(source)
    ways: dict[str, Callable[[int], object]] = {
        "torch copy_": lambda index: target.copy_(source),
        # An elementwise kernel of PyTorch's: it cannot be turned into a copy by an engine.
        "torch neg": lambda index: torch.neg(source, out=target),
    }
    for block, num_warps in ((2048, 8), (4096, 8), (8192, 8), (8192, 16)):
        ways[f"triton {block}, {num_warps} warps"] = _copier(source, target, block, num_warps)
    num_bytes = 2.0 * source.numel() * source.itemsize
    copies = {name: num_bytes / _best(stopwatch, run, 4) * 1e6 for name, run in ways.items()}
    assert torch.equal(source, target)  # the last way has copied
    x, w = stopwatch.cut(0, _SIDE, _SIDE), stopwatch.cut(1 << 28, _SIDE, _SIDE)
    product = _best(stopwatch, lambda index: torch.mm(x, w.t()), 8)
    return Ceilings(max(copies.values()), 2 * _SIDE**3 / product * 1e6, copies)


def _copier(source: Tensor, target: Tensor, block: int, num_warps: int) -> Callable[[int], object]:
    grid = (source.numel() // block,)
    return lambda index: _copy_kernel[grid](source, target, BLOCK=block, num_warps=num_warps)


def _best(stopwatch: Stopwatch, run: Callable[[int], object], nodes: int) -> float:
    return min(stopwatch.microseconds(run, 1, nodes=nodes) for _ in range(_REPEATS))
