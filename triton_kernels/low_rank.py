"""What adapters (LoRA) add to a product: y += (x down^T) up^T, with the matrices of each row's own adapter.

Rows are taken in tiles of one adapter each (`row_groups.py`), and what a row gets depends on nothing but the row. Knows
no model; scales are part of `up`.

The first of the two kernels runs beside the product, whose numbers it does not want, the second behind both.

Shape suffixes: T rows (tokens), K reduced size, N output size, A adapters, Q rank of a module, R of all modules, S
slices of K.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm_reference
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, prefetch, wait_for_previous
from tercet.triton_kernels.row_groups import NO_TILE, RowGroups
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

RANK_MULTIPLE = 16
"""Ranks are padded to it with zeros."""
_SLICE = 1024
"""Of K: each a program's. Their sums are added in order."""
_MOST_SLOTS = 48
"""Tiles of a block of rows that have programs of their own; those behind are for the same again."""
_WIDTH = 128
"""Of tiles of y, in 16 bits."""
_SIZES = ["T", "tiles", "slots"]


@dataclass(frozen=True)
class LowRank:
    """Of one product of a layer: those of all adapters. Where an adapter leaves a module as it is, zeros.

    Modules of one product (q, k and v) have rows of `down` behind each other, and rows of y of their own.
    """

    down_ARK: Tensor
    up_ANQ: Tensor
    starts: tuple[int, ...] = (0,)
    """The first row of y of each module; of gates and what they are multiplied by, (0, 1): they come in turns."""

    def __len__(self) -> int:
        """How many adapters there are."""
        return len(self.down_ARK)

    @property
    def in_turns(self) -> bool:
        return self.starts == (0, 1)

    def check(self) -> None:
        """Refuse what does not fit together."""
        A, R, _ = self.down_ARK.shape
        Q = R // len(self.starts)
        check_dtype("down", self.down_ARK, *FLOATS)
        check_contiguous("down", self.down_ARK)
        if not A or R % (RANK_MULTIPLE * len(self.starts)):
            wanted = f"some, each of {len(self.starts)} times a multiple of {RANK_MULTIPLE}"
            raise ValueError(f"down: got {A} adapters of {R} rows, wanted {wanted}")
        check_shape("up", self.up_ANQ, A, None, Q)
        check_same("up", self.up_ANQ, self.down_ARK)

    def whole_up(self, adapter: int) -> Tensor:
        """One adapter's second matrix as if it were one module's: [N, R], with zeros."""
        N, Q = self.up_ANQ.shape[1:]
        whole_NR = self.up_ANQ.new_zeros(N, Q * len(self.starts))
        for module, start in enumerate(self.starts):
            step = 2 if self.in_turns else None
            end = N if self.in_turns or module + 1 == len(self.starts) else self.starts[module + 1]
            rows = slice(start, end, step)
            whole_NR[rows, module * Q : (module + 1) * Q] = self.up_ANQ[adapter, rows]
        return whole_NR


@dataclass(frozen=True)
class Norm:
    """Of the rows of x: the product norms them itself."""

    weight_K: Tensor
    eps: float


@triton.jit
def _tile_adapter(tile_adapters_ptr, block, tile, tiles):
    return tl.load(tile_adapters_ptr + block * tiles + tile, mask=tile < tiles, other=NO_TILE)


@triton.jit
def _has_columns(start_n, BLOCK_N: tl.constexpr, WHICH: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr, N):
    """Whether some columns of a tile of y are those of this module."""
    first: tl.constexpr = 0 if WHICH == 0 else START1 if WHICH == 1 else START2
    end: tl.constexpr = START1 if WHICH == 0 else START2 if WHICH == 1 else N
    in_turns: tl.constexpr = START1 == 1
    return ((start_n < end) & (start_n + BLOCK_N > first)) | in_turns


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
    block, tile = tl.program_id(0) // slots, tl.program_id(0) % slots
    ranks = tl.program_id(1) // SLICES * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1) % SLICES
    adapter = _tile_adapter(tile_adapters_ptr, block, tile, tiles)
    while adapter != NO_TILE:
        if adapter >= 0:
            rows = tl.load(rows_ptr + (block * tiles + tile) * HEIGHT + tl.arange(0, HEIGHT))
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
        tile += slots
        adapter = _tile_adapter(tile_adapters_ptr, block, tile, tiles)
    wait_for_previous(PDL)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _expand_kernel(
    low_ptr, squares_ptr, eps, up_ptr, rows_ptr, tile_adapters_ptr, y_ptr, out_ptr, T, tiles, slots,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, SLICES: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows x slots, tiles of N): one program adds to a tile of y what its rows get. The sum over slices
    is rounded to x's type first, as if a layer had made it. GATE: silu(even columns) * odd columns of that goes to
    `out`, of all rows, and y is left as it is."""
    let_next_start(PDL)
    block, tile = tl.program_id(0) // slots, tl.program_id(0) % slots
    start_n = tl.program_id(1) * BLOCK_N
    columns = start_n + tl.arange(0, BLOCK_N)
    module = columns % 2 if START1 == 1 else (columns >= START1).to(tl.int32) + (columns >= START2).to(tl.int32)
    # What ran ahead of the product is done, since the kernel ahead of this one has begun.
    adapter = _tile_adapter(tile_adapters_ptr, block, tile, tiles)
    if PDL and N % BLOCK_N == 0 and adapter >= 0:
        prefetch(up_ptr + (adapter.to(tl.int64) * N + start_n) * Q, 1, BLOCK_N * Q, BLOCK_N * Q)
    wait_for_previous(PDL)
    while adapter != NO_TILE:
        if adapter >= 0 or GATE:
            rows = tl.load(rows_ptr + (block * tiles + tile) * HEIGHT + tl.arange(0, HEIGHT))
            there = rows >= 0
            mask = there[:, None] & (columns < N)[None, :]
            y_tile = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
            y = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
            if adapter >= 0:
                scale = tl.full([HEIGHT], 1.0, tl.float32)
                if NORM:
                    squares = tl.zeros([HEIGHT], tl.float32)
                    for part in tl.static_range(SLICES):
                        squares += tl.load(squares_ptr + part * T + rows, mask=there, other=0.0)
                    scale = tl.rsqrt(squares / K + eps)
                up = up_ptr + adapter.to(tl.int64) * (N * Q) + columns[None, :] * Q
                low_rows = low_ptr + rows.to(tl.int64)[:, None] * R
                for which in tl.static_range(R // Q):
                    if _has_columns(start_n, BLOCK_N, which, START1, START2, N):
                        theirs = (module == which) & (columns < N)
                        for start in range(0, Q, BLOCK_Q):
                            ranks = start + tl.arange(0, BLOCK_Q)
                            weights = tl.load(
                                up + ranks[:, None], mask=theirs[None, :] & (ranks < Q)[:, None], other=0.0
                            )
                            low = tl.zeros([HEIGHT, BLOCK_Q], tl.float32)
                            for part in tl.static_range(SLICES):
                                places = low_rows + part * T.to(tl.int64) * R + which * Q + ranks[None, :]
                                low += tl.load(places, mask=there[:, None] & (ranks < Q)[None, :], other=0.0)
                            low *= scale[:, None]
                            y = tl.dot(low.to(weights.dtype), weights, y, input_precision="ieee")
            if GATE:
                rounded = y.to(y_ptr.dtype.element_ty).to(tl.float32)
                gate, factor = tl.split(tl.reshape(rounded, [HEIGHT, BLOCK_N // 2, 2]))
                gated = gate / (1.0 + tl.exp(-gate)) * factor
                halves = start_n // 2 + tl.arange(0, BLOCK_N // 2)
                places = out_ptr + rows.to(tl.int64)[:, None] * (N // 2) + halves[None, :]
                tl.store(places, gated.to(out_ptr.dtype.element_ty), mask=there[:, None] & (halves < N // 2)[None, :])
            else:
                tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=mask)
        tile += slots
        adapter = _tile_adapter(tile_adapters_ptr, block, tile, tiles)


class Addition:
    """What adapters make of rows of x (normed, if there is a norm), to be added to what a product makes of them.

    Made before the product: what that frees is not to be had while it is in use. Where the product's kernels are
    launched within `next_starts_late`, the first of this runs beside them.
    """

    def __init__(self, x_TK: Tensor, low_rank: LowRank, groups: RowGroups, norm: Norm | None = None) -> None:
        low_rank.check()
        (_, R, K), T = low_rank.down_ARK.shape, len(groups)
        check_shape("x", x_TK, T, K)
        check_same("x", x_TK, low_rank.down_ARK)
        if norm is not None:
            check_shape("norm", norm.weight_K, K)
            check_same("norm", norm.weight_K, x_TK)
        self._x_TK, self._low_rank, self._groups, self._norm = x_TK, low_rank, groups, norm
        if not use_kernels(x_TK):
            return
        num_blocks, self._tiles, self._height = groups.rows_BMH.shape
        self._slots = min(self._tiles, _MOST_SLOTS)
        self._num_tiles = num_blocks * self._slots
        self._rank, self._slices = R // len(low_rank.starts), cdiv(K, _SLICE)
        self._low_STR = torch.empty(self._slices, T, R, dtype=torch.float32, device=x_TK.device)
        self._squares_ST = self._low_STR if norm is None else self._low_STR.new_empty(self._slices, T)

    def to(self, y_TN: Tensor, *, gate: bool = False) -> Tensor:
        """Add it to y, in place, in x's type or fp32: y. A row of adapter -1 stays as it is.

        `gate`: silu(even columns) * odd columns of the sum, rounded before that, which y is not then: [T, N / 2].
        Sums in fp32, rounded between the two products and at last; graph-safe.
        """
        x_TK, low_rank, T, N = self._x_TK, self._low_rank, len(self._x_TK), self._low_rank.up_ANQ.shape[1]
        check_shape("y", y_TN, T, N)
        check_same("y", y_TN, x_TK, torch.float32)
        if not use_kernels(x_TK):
            add_low_rank_reference(y_TN, x_TK, low_rank, self._groups.adapters_T, self._norm)
            return silu_and_mul_reference(y_TN[:, ::2], y_TN[:, 1::2]) if gate else y_TN
        out = y_TN.new_empty(T, N // 2) if gate else y_TN
        if T:
            self._shrink()
            self._expand(y_TN, out, gate=gate)
        return out

    def _shrink(self) -> None:
        x_TK, down_ARK, groups, norm = self._x_TK, self._low_rank.down_ARK, self._groups, self._norm
        _, R, K = down_ARK.shape
        few = self._height == 16
        block_r = _block(self._rank) if few else min(next_power_of_2(R), 64)
        _shrink_kernel[(self._num_tiles, cdiv(R, block_r) * self._slices)](
            x_TK, x_TK if norm is None else norm.weight_K, down_ARK, groups.rows_BMH, groups.adapters_BM,
            self._low_STR, self._squares_ST, len(x_TK), self._tiles, self._slots,
            K=K, R=R, HEIGHT=self._height, BLOCK_R=block_r, BLOCK_K=32 if x_TK.element_size() == 4 else 128,
            SPLITS=8 if few else 1, WIDTH=_SLICE, SLICES=self._slices, NORM=norm is not None,
            num_warps=8 if few else 4, **overlap_options(x_TK),
        )  # fmt: skip

    def _expand(self, y_TN: Tensor, out: Tensor, *, gate: bool) -> None:
        low_rank, groups, (T, N), norm = self._low_rank, self._groups, y_TN.shape, self._norm
        (_, R, K), starts = low_rank.down_ARK.shape, (*low_rank.starts, N, N)
        block_n = _WIDTH * 2 // low_rank.up_ANQ.element_size()
        _expand_kernel[(self._num_tiles, cdiv(N, block_n))](
            self._low_STR, self._squares_ST, 0.0 if norm is None else norm.eps, low_rank.up_ANQ, groups.rows_BMH,
            groups.adapters_BM, y_TN, out, T, self._tiles, self._slots,
            K=K, N=N, R=R, Q=self._rank, START1=starts[1], START2=starts[2], HEIGHT=self._height, BLOCK_N=block_n,
            BLOCK_Q=_block(self._rank), SLICES=self._slices, NORM=norm is not None, GATE=gate, num_warps=4,
            **overlap_options(y_TN),
        )  # fmt: skip


def _block(rank: int) -> int:
    return next(block for block in (64, 32, 16) if rank % block == 0)


def add_low_rank_reference(
    y_TN: Tensor, x_TK: Tensor, low_rank: LowRank, adapters_T: Tensor, norm: Norm | None = None
) -> None:
    """The sum in PyTorch, in place."""
    if norm is not None:
        x_TK = rms_norm_reference(x_TK, norm.weight_K, norm.eps)
    for adapter in adapters_T.unique().tolist():
        if adapter >= 0:
            own_T = adapters_T == adapter
            low_TR = (x_TK[own_T].float() @ low_rank.down_ARK[adapter].float().t()).to(x_TK.dtype)
            added_TN = low_TR.float() @ low_rank.whole_up(adapter).float().t()
            y_TN[own_T] = (y_TN[own_T].float() + added_TN).to(y_TN.dtype)
