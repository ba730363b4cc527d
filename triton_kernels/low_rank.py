"""What adapters (LoRA) add to a product: y += (x down^T) up^T, with the matrices of each row's own adapter.

A tile's rows may be of several adapters: it is computed once for each that it has, and of that only the adapter's own
rows are kept. So a row's bits depend on nothing but the row. Knows no model; scales are part of `up`.

Shape suffixes: T rows (tokens), K reduced size, N output size, A adapters, R rank, S slices of K.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

RANK_MULTIPLE = 16
"""Ranks are padded to it with zeros."""
_MANY_ROWS = 512
"""From here on tiles are higher, and rarely of several adapters: in prompts neighbours are of one request."""
_MOST_SHARES = 8
_SLICES = 4
"""Of K, in tiles of few rows: each a program's. Their sums are added in order."""


@dataclass(frozen=True)
class LowRank:
    """Of one matrix of a layer: those of all adapters. Where an adapter leaves the matrix as it is, zeros."""

    down_ARK: Tensor
    up_ANR: Tensor

    def check(self) -> None:
        """Refuse what does not fit together."""
        A, R, _ = self.down_ARK.shape
        check_dtype("down", self.down_ARK, *FLOATS)
        check_contiguous("down", self.down_ARK)
        check_shape("up", self.up_ANR, A, None, R)
        check_same("up", self.up_ANR, self.down_ARK)
        if not A or R % RANK_MULTIPLE:
            raise ValueError(f"down: got {A} adapters of rank {R}, wanted some, of a multiple of {RANK_MULTIPLE}")


@triton.jit
def _next_adapter(adapters, seen):
    """The smallest above `seen` that some row has; -1 behind the last."""
    NONE: tl.constexpr = 2147483647
    lowest = tl.min(tl.where(adapters > seen, adapters, NONE), 0)
    return tl.where(lowest == NONE, -1, lowest)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["T"])
def _shrink_kernel(
    x_ptr, down_ptr, adapters_ptr, low_ptr, T,
    K: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of the rank x slices of K, SHARES): one program sums a slice of K for a tile of rows,
    in turns with others that do so for the tile's other adapters."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ranks = tl.program_id(1) // SLICES * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1) % SLICES
    WIDTH: tl.constexpr = (K + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K) * BLOCK_K
    adapters = tl.load(adapters_ptr + rows, mask=rows < T, other=-1)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    low_rows = low_ptr + (part * T + rows).to(tl.int64)[:, None] * R + ranks[None, :]
    adapter = _next_adapter(adapters, -1)
    turn = 0
    while adapter >= 0:
        if turn % SHARES == tl.program_id(2):
            own = adapters == adapter
            down = down_ptr + adapter.to(tl.int64) * (R * K) + ranks[None, :] * K
            total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for start in range(0, WIDTH, BLOCK_K):
                columns = part * WIDTH + start + tl.arange(0, BLOCK_K)
                inside = columns < K
                x = tl.load(x_rows + columns[None, :], mask=own[:, None] & inside[None, :], other=0.0)
                weights = tl.load(down + columns[:, None], mask=(ranks < R)[None, :] & inside[:, None], other=0.0)
                total = tl.dot(x, weights, total, input_precision="ieee")
            tl.store(low_rows, total, mask=own[:, None] & (ranks < R)[None, :])
        adapter = _next_adapter(adapters, adapter)
        turn += 1


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["T"])
def _expand_kernel(
    low_ptr, up_ptr, adapters_ptr, y_ptr, T,
    N: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr, SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of N, SHARES): one program adds to a tile of y what rows of its adapters get, in turns
    with others. The sum over slices is rounded to y's type first, as if a layer had made it."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    adapters = tl.load(adapters_ptr + rows, mask=rows < T, other=-1)
    low_rows = low_ptr + rows.to(tl.int64)[:, None] * R
    y_tile = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    adapter = _next_adapter(adapters, -1)
    turn = 0
    while adapter >= 0:
        if turn % SHARES == tl.program_id(2):
            own = adapters == adapter
            up = up_ptr + adapter.to(tl.int64) * (N * R) + columns[None, :] * R
            total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            for start in range(0, R, BLOCK_R):
                ranks = start + tl.arange(0, BLOCK_R)
                inside = own[:, None] & (ranks < R)[None, :]
                low = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for part in tl.static_range(SLICES):
                    low += tl.load(low_rows + part * T.to(tl.int64) * R + ranks[None, :], mask=inside, other=0.0)
                weights = tl.load(up + ranks[:, None], mask=(ranks < R)[:, None] & (columns < N)[None, :], other=0.0)
                total = tl.dot(low.to(weights.dtype), weights, total, input_precision="ieee")
            mask = own[:, None] & (columns < N)[None, :]
            y = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_tile, (y + total).to(y_ptr.dtype.element_ty), mask=mask)
        adapter = _next_adapter(adapters, adapter)
        turn += 1


def add_low_rank(
    y_TN: Tensor, x_TK: Tensor, low_rank: LowRank, adapters_T: Tensor, *, deterministic: bool = False
) -> None:
    """Add to each row of y, in place, what its adapter makes of the row of x; a row of adapter -1 stays as it is.

    Sums in fp32, rounded between the two products and at last; graph-safe. `deterministic`: a row's bits do not depend
    on T.
    """
    low_rank.check()
    A, R, K = low_rank.down_ARK.shape
    N, T = low_rank.up_ANR.shape[1], y_TN.shape[0]
    for name, tensor, width in (("y", y_TN, N), ("x", x_TK, K)):
        check_shape(name, tensor, T, width)
        check_same(name, tensor, low_rank.down_ARK)
    check_indices("adapters", adapters_T, y_TN, T)
    if not use_kernels(y_TN):
        add_low_rank_reference(y_TN, x_TK, low_rank, adapters_T)
        return
    if not T:
        return
    many = T > _MANY_ROWS and not deterministic
    block_t = 64 if many else 16
    slices = 1 if many else _SLICES
    shares = 1 if T > _MANY_ROWS else min(A, _MOST_SHARES)
    tiles, block_r = cdiv(T, block_t), 64 if R % 64 == 0 else 32 if R % 32 == 0 else 16
    wide = y_TN.element_size() == 4
    low_STR = torch.empty(slices, T, R, dtype=torch.float32, device=y_TN.device)
    options = {"SHARES": shares, "SLICES": slices, "num_warps": 4, **overlap_options(y_TN)}
    _shrink_kernel[(tiles, cdiv(R, block_r) * slices, shares)](
        x_TK, low_rank.down_ARK, adapters_T, low_STR, T,
        K=K, R=R, BLOCK_T=block_t, BLOCK_R=block_r, BLOCK_K=32 if wide else 128, **options,
    )  # fmt: skip
    block_n = 64 if wide else 128
    _expand_kernel[(tiles, cdiv(N, block_n), shares)](
        low_STR, low_rank.up_ANR, adapters_T, y_TN, T,
        N=N, R=R, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_R=block_r, **options,
    )  # fmt: skip


def add_low_rank_reference(y_TN: Tensor, x_TK: Tensor, low_rank: LowRank, adapters_T: Tensor) -> None:
    """The same in PyTorch."""
    for adapter in adapters_T.unique().tolist():
        if adapter >= 0:
            own_T = adapters_T == adapter
            low_TR = (x_TK[own_T].float() @ low_rank.down_ARK[adapter].float().t()).to(x_TK.dtype)
            added_TN = low_TR.float() @ low_rank.up_ANR[adapter].float().t()
            y_TN[own_T] = (y_TN[own_T].float() + added_TN).to(y_TN.dtype)
