"""What adapters add to rows' products, in tiles of one adapter each (`row_groups.py`).

What a row gets depends on nothing but the row. The first of the two kernels runs beside the product, whose numbers it
does not want, the second behind both.

Shape suffixes: as in `low_rank.py`; S slices of K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.low_rank import LowRank, Norm
from tercet.triton_kernels.low_rank_row import module_of
from tercet.triton_kernels.matmul_epilogue import gate_pairs
from tercet.triton_kernels.overlap import let_next_start, overlap_options, prefetch, wait_for_previous
from tercet.triton_kernels.row_groups import NO_TILE, RowGroups
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_SLICE, _WIDE_SLICE = 1024, 4096
"""Of K: each a program's. Their sums are added in order. Few rows have few programs, others many sums."""
_FEW_ROWS = 4
_MOST_SLOTS = 48
"""Tiles of a block of rows that have programs of their own; those behind are for the same again."""
_WIDTH = 128
"""Of tiles of y, in 16 bits."""
_SIZES = ["T", "tiles", "slots"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _shrink_kernel(
    x_ptr, norm_ptr, down_ptr, rows_ptr, tile_adapters_ptr, low_ptr, squares_ptr, T, tiles, slots,
    K: tl.constexpr, R: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows x slots, tiles of the rank x slices of K): one program sums a slice of K for a tile of rows,
    SPLITS times BLOCK_K at once, each split by warps of its own.

    It starts when the product ahead has waited, so there is nothing to wait for, but that it has ended: what comes
    behind this one waits for both. NORM: the sum is of weighed numbers, and that of their squares is beside it.
    """
    let_next_start(PDL)
    block = tl.program_id(0) // slots
    ranks = tl.program_id(1) // SLICES * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1) % SLICES
    for tile in range(tl.program_id(0) % slots, tiles, slots):
        adapter = tl.load(tile_adapters_ptr + block * tiles + tile)
        rows = tl.load(rows_ptr + (block * tiles + tile) * HEIGHT + tl.arange(0, HEIGHT))
        if adapter >= 0:
            down = down_ptr + adapter.to(tl.int64) * (R * K) + ranks[None, :] * K
            x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
            total = tl.zeros([SPLITS, HEIGHT, BLOCK_R] if SPLITS > 1 else [HEIGHT, BLOCK_R], tl.float32)
            squares = tl.zeros([HEIGHT], tl.float32)
            for start in range(0, WIDTH, SPLITS * BLOCK_K):
                columns = part * WIDTH + start + tl.arange(0, SPLITS * BLOCK_K)
                inside = columns < K
                weights = tl.load(down + columns[:, None], mask=inside[:, None] & (ranks < R)[None, :], other=0.0)
                x = tl.load(x_rows + columns[None, :], mask=(rows >= 0)[:, None] & inside[None, :], other=0.0)
                if NORM:
                    wide = x.to(tl.float32)
                    squares += tl.sum(wide * wide, 1)
                    weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
                    x = (wide * weight[None, :]).to(x.dtype)
                if SPLITS > 1:
                    x = tl.permute(tl.reshape(x, [HEIGHT, SPLITS, BLOCK_K]), (1, 0, 2))
                    weights = tl.reshape(weights, [SPLITS, BLOCK_K, BLOCK_R])
                total = tl.dot(x, weights, total, input_precision="ieee")
            if SPLITS > 1:
                total = tl.sum(total, 0)
            place = part * T + rows
            low_rows = low_ptr + place.to(tl.int64)[:, None] * R + ranks[None, :]
            tl.store(low_rows, total, mask=(rows >= 0)[:, None] & (ranks < R)[None, :])
            if NORM and tl.program_id(1) < SLICES:
                tl.store(squares_ptr + place, squares, mask=rows >= 0)
    wait_for_previous(PDL)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _expand_kernel(
    low_ptr, squares_ptr, eps, up_ptr, rows_ptr, tile_adapters_ptr, y_ptr, out_ptr, T, tiles, slots,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    START3: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, SLICES: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows x slots, tiles of N): one program adds to a tile of y what its rows get. The sum over slices
    is rounded to x's type first, as if a layer had made it. GATE: silu(even columns) * odd columns of that goes to
    `out`, of all rows, and y is left as it is."""
    let_next_start(PDL)
    block = tl.program_id(0) // slots
    start_n = tl.program_id(1) * BLOCK_N
    columns = start_n + tl.arange(0, BLOCK_N)
    module = module_of(columns, START1, START2, START3)
    first = 0 if START1 == 1 else module_of(start_n, START1, START2, START3)
    last = R // Q - 1 if START1 == 1 else module_of(tl.minimum(start_n + BLOCK_N, N) - 1, START1, START2, START3)
    for tile in range(tl.program_id(0) % slots, tiles, slots):
        # What ran ahead of the product is done, since the kernel ahead of this one has begun.
        adapter = tl.load(tile_adapters_ptr + block * tiles + tile)
        rows = tl.load(rows_ptr + (block * tiles + tile) * HEIGHT + tl.arange(0, HEIGHT))
        up = up_ptr + adapter.to(tl.int64) * (N * Q)
        if PDL and N % BLOCK_N == 0 and adapter >= 0:
            prefetch(up + start_n * Q, 1, BLOCK_N * Q, BLOCK_N * Q)
        wait_for_previous(PDL)
        if adapter >= 0 or (GATE and adapter != NO_TILE):
            there = rows >= 0
            own = there & (adapter >= 0)
            mask = there[:, None] & (columns < N)[None, :]
            y_tile = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
            y = tl.load(y_tile, mask=mask, other=0.0)
            scale = tl.full([HEIGHT], 1.0, tl.float32)
            if NORM:
                squares = tl.zeros([HEIGHT], tl.float32)
                for part in tl.static_range(SLICES):
                    squares += tl.load(squares_ptr + part * T + rows, mask=own, other=0.0)
                scale = tl.rsqrt(squares / K + eps)
            total = tl.zeros([HEIGHT, BLOCK_N], tl.float32)
            for start in range(first * Q, (last + 1) * Q, BLOCK_Q):
                ranks = start + tl.arange(0, BLOCK_Q)
                theirs = (ranks // Q)[:, None] == tl.where(columns < N, module, -1)[None, :]
                places = columns[None, :] * Q + (ranks % Q)[:, None]
                weights = tl.load(up + places, mask=theirs & (adapter >= 0), other=0.0)
                low = tl.zeros([HEIGHT, BLOCK_Q], tl.float32)
                for part in tl.static_range(SLICES):
                    place = part * T + rows
                    low_rows = low_ptr + place.to(tl.int64)[:, None] * R + ranks[None, :]
                    low += tl.load(low_rows, mask=own[:, None], other=0.0)
                total = tl.dot((low * scale[:, None]).to(weights.dtype), weights, total, input_precision="ieee")
            total += y.to(tl.float32)
            if GATE:
                rounded = total.to(y_ptr.dtype.element_ty).to(tl.float32)
                gated = gate_pairs(rounded, HEIGHT, BLOCK_N)
                halves = start_n // 2 + tl.arange(0, BLOCK_N // 2)
                places = out_ptr + rows.to(tl.int64)[:, None] * (N // 2) + halves[None, :]
                tl.store(places, gated.to(out_ptr.dtype.element_ty), mask=there[:, None] & (halves < N // 2)[None, :])
            else:
                tl.store(y_tile, total.to(y_ptr.dtype.element_ty), mask=mask)


class TileAddition:
    """What adapters make of rows, with room for what is between their matrices."""

    def __init__(self, x_TK: Tensor, low_rank: LowRank, groups: RowGroups, norm: Norm | None) -> None:
        (_, R, K), T = low_rank.down_ARK.shape, len(groups)
        self._x_TK, self._low_rank, self._groups, self._norm = x_TK, low_rank, groups, norm
        num_blocks, self._tiles, self._height = groups.rows_BMH.shape
        self._slots = min(self._tiles, _MOST_SLOTS)
        self._num_tiles = num_blocks * self._slots
        self._rank = R // len(low_rank.starts)
        self._width = min(_SLICE if T <= _FEW_ROWS or groups.deterministic else _WIDE_SLICE, cdiv(K, _SLICE) * _SLICE)
        self._slices = cdiv(K, self._width)
        self._low_STR = torch.empty(self._slices, T, R, dtype=torch.float32, device=x_TK.device)
        self._squares_ST = self._low_STR if norm is None else self._low_STR.new_empty(self._slices, T)

    def shrink(self) -> None:
        """What the first matrices make of the rows: beside the product."""
        x_TK, down_ARK, groups, norm = self._x_TK, self._low_rank.down_ARK, self._groups, self._norm
        _, R, K = down_ARK.shape
        few = self._height == 16
        block_r = _block(self._rank) if few else min(next_power_of_2(R), 64)
        _shrink_kernel[(self._num_tiles, cdiv(R, block_r) * self._slices)](
            x_TK, x_TK if norm is None else norm.weight_K, down_ARK, groups.rows_BMH, groups.adapters_BM,
            self._low_STR, self._squares_ST, len(x_TK), self._tiles, self._slots,
            K=K, R=R, HEIGHT=self._height, BLOCK_R=block_r, BLOCK_K=32 if x_TK.element_size() == 4 else 128,
            SPLITS=8 if few else 1, WIDTH=self._width, SLICES=self._slices, NORM=norm is not None,
            num_warps=8 if few else 4, num_stages=2 if few else 3, **overlap_options(x_TK),
        )  # fmt: skip

    def expand(self, y_TN: Tensor, out: Tensor, *, gate: bool) -> None:
        """What the second make of that, added to y, or gated to `out`."""
        low_rank, groups, (T, N), norm = self._low_rank, self._groups, y_TN.shape, self._norm
        (_, R, K), starts = low_rank.down_ARK.shape, (*low_rank.starts, N, N, N)
        block_n = _WIDTH * 2 // low_rank.up_ANQ.element_size()
        _expand_kernel[(self._num_tiles, cdiv(N, block_n))](
            self._low_STR, self._squares_ST, 0.0 if norm is None else norm.eps, low_rank.up_ANQ, groups.rows_BMH,
            groups.adapters_BM, y_TN, out, T, self._tiles, self._slots,
            K=K, N=N, R=R, Q=self._rank, START1=starts[1], START2=starts[2], START3=starts[3],
            HEIGHT=self._height, BLOCK_N=block_n,
            BLOCK_Q=_block(R if low_rank.in_turns else self._rank), SLICES=self._slices, NORM=norm is not None,
            GATE=gate, num_warps=4, num_stages=1,
            **overlap_options(y_TN),
        )  # fmt: skip


def _block(rank: int) -> int:
    return next(block for block in (64, 32, 16) if rank % block == 0)
