"""Weights in FP8 beside their scales, and the plain numbers that they stand for.

A number stands for itself times the scale of its row and its group of columns, in fp32, rounded once: kernels that read
such weights make those numbers on the way, and so give the bits of products with plain weights.

Shape suffixes: N output size (rows), K reduced size (columns), G groups of columns.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FP8, check_contiguous, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_BLOCK = 4096
"""Numbers that a program expands."""


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """`scales_GN`: groups follow each other, K / G columns each; of whole rows where G is one. `dtype`: of the numbers
    that it stands for."""

    numbers_NK: Tensor
    scales_GN: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.numbers_NK.shape

    @property
    def device(self) -> torch.device:
        return self.numbers_NK.device

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.numbers_NK.shape[1] // len(self.scales_GN)

    @property
    def nbytes(self) -> int:
        return self.numbers_NK.nbytes + self.scales_GN.nbytes

    def __len__(self) -> int:
        return len(self.numbers_NK)

    def __getitem__(self, rows: slice) -> "ScaledWeight":
        """Some rows: a view."""
        return ScaledWeight(self.numbers_NK[rows], self.scales_GN[:, rows], self.dtype)


Weight = Tensor | ScaledWeight
"""What a product takes."""


def check_weight(name: str, w_NK: Weight, x: Tensor, N: int | None, K: int) -> None:
    """[N, K], contiguous, on x's device; of x's type, or in FP8 beside scales for it."""
    if isinstance(w_NK, Tensor):
        check_shape(name, w_NK, N, K)
        check_same(name, w_NK, x)
        return
    numbers, scales = w_NK.numbers_NK, w_NK.scales_GN
    check_shape(name, numbers, N, K)
    check_shape(f"{name}'s scales", scales, None, len(w_NK))
    if not len(scales) or K % len(scales):
        raise ValueError(f"{name}'s scales: got {len(scales)} groups, wanted a number that divides {K}")
    if w_NK.dtype != x.dtype:
        raise ValueError(f"{name}: got FP8 numbers for {w_NK.dtype}, wanted {x.dtype}")
    for part, tensor, dtype in ((name, numbers, FP8), (f"{name}'s scales", scales, torch.float32)):
        check_dtype(part, tensor, dtype)
        check_device(part, tensor, x)
        check_contiguous(part, tensor)


@triton.jit
def widen(numbers, scales, dtype: tl.constexpr):
    """What FP8 numbers stand for."""
    return (numbers.to(tl.float32) * scales).to(dtype)


@triton.jit
def _expand_kernel(
    numbers_ptr, scales_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N, ceil(K / BLOCK)): one program expands BLOCK numbers of a row, group by group where those are shorter."""
    row = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = min(GROUP & -GROUP, BLOCK)  # columns of which all share a scale
    pieces = tl.program_id(1) * (BLOCK // WIDTH) + tl.arange(0, BLOCK // WIDTH)
    columns = pieces[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = columns < K
    numbers = tl.load(numbers_ptr + row * K + columns, mask=inside, other=0.0)
    scales = tl.load(scales_ptr + (pieces * WIDTH // GROUP).to(tl.int64) * N + row, mask=pieces * WIDTH < K, other=0.0)
    let_next_start(PDL)
    wait_for_previous(PDL)  # it may still read what was here
    tl.store(out_ptr + row * K + columns, widen(numbers, scales[:, None], out_ptr.dtype.element_ty), mask=inside)


def expand(w_NK: ScaledWeight) -> Tensor:
    """The numbers that it stands for: [N, K]. Graph-safe."""
    N, K = w_NK.shape
    check_contiguous("w", w_NK.numbers_NK)
    check_contiguous("w's scales", w_NK.scales_GN)
    if not use_kernels(w_NK.numbers_NK):
        return expand_reference(w_NK)
    out_NK = torch.empty(N, K, dtype=w_NK.dtype, device=w_NK.device)
    block = min(next_power_of_2(K), _BLOCK)
    _expand_kernel[(N, cdiv(K, block))](
        w_NK.numbers_NK, w_NK.scales_GN, out_NK, N=N, K=K, GROUP=w_NK.group, BLOCK=block, num_warps=4,
        **overlap_options(out_NK),
    )  # fmt: skip
    return out_NK


def expand_reference(w_NK: ScaledWeight) -> Tensor:
    """The same in PyTorch."""
    numbers_NGI = w_NK.numbers_NK.float().unflatten(1, (len(w_NK.scales_GN), -1))
    expanded_NK: Tensor = (numbers_NGI * w_NK.scales_GN.t()[:, :, None]).flatten(1).to(w_NK.dtype)
    return expanded_NK


def plain(w_NK: Weight) -> Tensor:
    """Itself, or the numbers that it stands for."""
    return w_NK if isinstance(w_NK, Tensor) else expand(w_NK)
