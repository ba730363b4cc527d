"""What an adapter adds to one row's product, where nothing counts but how soon it is there: no matrix units.

The kernels run as those of `low_rank_tiles.py` do.

Shape suffixes: as in `low_rank.py`; S slices of K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.low_rank import LowRank, Norm
from tercet.triton_kernels.matmul_epilogue import gated
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_SLICE = 512
_BLOCK_R = 16
_BLOCK_N = 128


@triton.jit
def module_of(columns, START1: tl.constexpr, START2: tl.constexpr, START3: tl.constexpr):
    """Which module's each column of y is."""
    if START1 == 1:
        return columns % 2
    behind = (columns >= START1).to(tl.int32) + (columns >= START2).to(tl.int32)
    return behind + (columns >= START3).to(tl.int32)


@triton.jit
def _shrink_row_kernel(
    x_ptr, norm_ptr, down_ptr, adapter_ptr, low_ptr, squares_ptr,
    K: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R / BLOCK_R x slices of K,)."""
    let_next_start(PDL)
    ranks = tl.program_id(0) // SLICES * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(0) % SLICES
    columns = part * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = columns < K
    adapter = tl.load(adapter_ptr)
    if adapter >= 0:
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        down = down_ptr + adapter.to(tl.int64) * (R * K) + ranks[:, None] * K + columns[None, :]
        weights = tl.load(down, mask=inside[None, :], other=0.0).to(tl.float32)
        if NORM:
            if tl.program_id(0) < SLICES:
                tl.store(squares_ptr + part, tl.sum(x * x, 0))
            weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            x = (x * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(low_ptr + part * R + ranks, tl.sum(weights * x[None, :], 1))
    wait_for_previous(PDL)


@triton.jit
def _expand_row_kernel(
    low_ptr, squares_ptr, eps, up_ptr, adapter_ptr, y_ptr, out_ptr,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    START3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, SLICES: tl.constexpr, BLOCK_S: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N,)."""
    let_next_start(PDL)
    start_n = tl.program_id(0) * BLOCK_N
    columns = start_n + tl.arange(0, BLOCK_N)
    there = columns < N
    module = module_of(columns, START1, START2, START3)
    first = 0 if START1 == 1 else module_of(start_n, START1, START2, START3)
    last = R // Q - 1 if START1 == 1 else module_of(tl.minimum(start_n + BLOCK_N, N) - 1, START1, START2, START3)
    # What ran ahead of the product is done, since the kernel ahead of this one has begun.
    adapter = tl.load(adapter_ptr)
    up = up_ptr + adapter.to(tl.int64) * (N * Q) + columns[:, None] * Q
    ranks = first * Q + tl.arange(0, BLOCK_Q)
    own = (there & (adapter >= 0))[:, None]
    weights = tl.load(up + (ranks % Q)[None, :], mask=own & ((ranks // Q)[None, :] == module[:, None]), other=0.0)
    wait_for_previous(PDL)
    if adapter >= 0 or GATE:
        y = tl.load(y_ptr + columns, mask=there, other=0.0).to(tl.float32)
        parts = tl.arange(0, BLOCK_S)
        scale = 1.0
        if NORM:
            squares = tl.load(squares_ptr + parts, mask=(parts < SLICES) & (adapter >= 0), other=0.0)
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        for start in range(first * Q, (last + 1) * Q, BLOCK_Q):
            ranks = start + tl.arange(0, BLOCK_Q)
            if start > first * Q:
                theirs = own & ((ranks // Q)[None, :] == module[:, None])
                weights = tl.load(up + (ranks % Q)[None, :], mask=theirs, other=0.0)
            lows = low_ptr + parts[:, None] * R + ranks[None, :]
            low = tl.sum(tl.load(lows, mask=(parts < SLICES)[:, None] & (adapter >= 0), other=0.0), 0) * scale
            low = low.to(up_ptr.dtype.element_ty).to(tl.float32)
            y += tl.sum(weights.to(tl.float32) * low[None, :], 1)
        if GATE:
            rounded = y.to(y_ptr.dtype.element_ty).to(tl.float32)
            gate, factor = tl.split(tl.reshape(rounded, [BLOCK_N // 2, 2]))
            halves = start_n // 2 + tl.arange(0, BLOCK_N // 2)
            tl.store(out_ptr + halves, gated(gate, factor).to(out_ptr.dtype.element_ty), mask=halves < N // 2)
        else:
            tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=there)


class RowAddition:
    """`Addition` of one row, whose bits are then not those that it has among others."""

    def __init__(self, x_1K: Tensor, low_rank: LowRank, adapter_1: Tensor, norm: Norm | None) -> None:
        _, self._R, self._K = low_rank.down_ARK.shape
        self._x_1K, self._low_rank, self._adapter_1, self._norm = x_1K, low_rank, adapter_1, norm
        self._slices = cdiv(self._K, _SLICE)
        self._low_SR = torch.empty(self._slices, self._R, dtype=torch.float32, device=x_1K.device)
        self._squares_S = self._low_SR if norm is None else self._low_SR.new_empty(self._slices)

    def shrink(self) -> None:
        """What the first matrix makes of the row: beside the product."""
        x_1K, norm = self._x_1K, self._norm
        _shrink_row_kernel[(self._R // _BLOCK_R * self._slices,)](
            x_1K, x_1K if norm is None else norm.weight_K, self._low_rank.down_ARK, self._adapter_1, self._low_SR,
            self._squares_S, K=self._K, R=self._R, BLOCK_R=_BLOCK_R, BLOCK_K=_SLICE, SLICES=self._slices,
            NORM=norm is not None, num_warps=4, **overlap_options(x_1K),
        )  # fmt: skip

    def expand(self, y_1N: Tensor, out: Tensor, *, gate: bool) -> None:
        """What the second makes of that, added to y, or gated to `out`."""
        low_rank, N, norm = self._low_rank, y_1N.shape[1], self._norm
        starts, rank = (*low_rank.starts, N, N, N), self._R // len(low_rank.starts)
        whole = self._R if low_rank.in_turns else rank
        _expand_row_kernel[(cdiv(N, _BLOCK_N),)](
            self._low_SR, self._squares_S, 0.0 if norm is None else norm.eps, low_rank.up_ANQ, self._adapter_1, y_1N,
            out, K=self._K, N=N, R=self._R, Q=rank, START1=starts[1], START2=starts[2], START3=starts[3],
            BLOCK_N=_BLOCK_N,
            BLOCK_Q=next(block for block in (32, 16) if whole % block == 0), SLICES=self._slices,
            BLOCK_S=next_power_of_2(self._slices), NORM=norm is not None, GATE=gate, num_warps=4, num_stages=1,
            **overlap_options(y_1N),
        )  # fmt: skip
