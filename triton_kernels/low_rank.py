"""What adapters (LoRA) add to a product: y += (x down^T) up^T, with the matrices of each row's own adapter.

A tile's rows may be of several adapters: it is computed once for each that it has, and of that only the adapter's own
rows are kept. So a row's bits depend on nothing but the row. Knows no model; scales are part of `up`.

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
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, prefetch, wait_for_previous
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

RANK_MULTIPLE = 16
"""Ranks are padded to it with zeros."""
_MANY_ROWS = 512
"""From here on tiles are higher, and rarely of several adapters: in prompts neighbours are of one request."""
_MOST_SHARES = 8
_SIZES = ["T", "shares"]
_SLICE = 512
"""Of K, in tiles of few rows: each a program's. Their sums are added in order."""


@dataclass(frozen=True)
class LowRank:
    """Of one product of a layer: those of all adapters. Where an adapter leaves a module as it is, zeros.

    Modules of one product (q, k and v) have rows of `down` behind each other, and rows of y of their own.
    """

    down_ARK: Tensor
    up_ANQ: Tensor
    starts: tuple[int, ...] = (0,)
    """The first row of y of each module; of gates and what they are multiplied by, (0, 1): they come in turns."""

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
def _next_adapter(adapters, seen):
    """The smallest above `seen` that some row has; -2 behind the last."""
    NONE: tl.constexpr = 2147483647
    lowest = tl.min(tl.where(adapters > seen, adapters, NONE), 0)
    return tl.where(lowest == NONE, -2, lowest)


@triton.jit
def _has_columns(start_n, BLOCK_N: tl.constexpr, WHICH: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr, N):
    """Whether some columns of a tile of y are those of this module."""
    first: tl.constexpr = 0 if WHICH == 0 else START1 if WHICH == 1 else START2
    end: tl.constexpr = START1 if WHICH == 0 else START2 if WHICH == 1 else N
    in_turns: tl.constexpr = START1 == 1
    return ((start_n < end) & (start_n + BLOCK_N > first)) | in_turns


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _shrink_kernel(
    x_ptr, norm_ptr, down_ptr, adapters_ptr, low_ptr, squares_ptr, T, shares,
    K: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, SLICES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of the rank x slices of K, shares): one program sums a slice of K for a tile of rows,
    in turns with others that do so for the tile's other adapters.

    It starts when the product ahead has waited, so there is nothing to wait for, but that it has ended: what comes
    behind this one waits for both. NORM: the sum is of weighed numbers, and that of their squares is beside it.
    """
    let_next_start(PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ranks = tl.program_id(1) // SLICES * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1) % SLICES
    adapters = tl.load(adapters_ptr + rows, mask=rows < T, other=-1)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    place = part * T + rows
    low_rows = low_ptr + place.to(tl.int64)[:, None] * R + ranks[None, :]
    adapter = _next_adapter(adapters, -1)
    turn = 0
    while adapter >= 0:
        if turn % shares == tl.program_id(2):
            own = adapters == adapter
            down = down_ptr + adapter.to(tl.int64) * (R * K) + ranks[None, :] * K
            total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            squares = tl.zeros([BLOCK_T], tl.float32)
            for start in range(0, WIDTH, BLOCK_K):
                columns = part * WIDTH + start + tl.arange(0, BLOCK_K)
                inside = columns < K
                x = tl.load(x_rows + columns[None, :], mask=own[:, None] & inside[None, :], other=0.0)
                weights = tl.load(down + columns[:, None], mask=(ranks < R)[None, :] & inside[:, None], other=0.0)
                if NORM:
                    wide = x.to(tl.float32)
                    squares += tl.sum(wide * wide, 1)
                    x = (wide * tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
                total = tl.dot(x, weights, total, input_precision="ieee")
            tl.store(low_rows, total, mask=own[:, None] & (ranks < R)[None, :])
            if NORM and tl.program_id(1) < SLICES:
                tl.store(squares_ptr + place, squares, mask=own)
        adapter = _next_adapter(adapters, adapter)
        turn += 1
    wait_for_previous(PDL)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _expand_kernel(
    low_ptr, squares_ptr, eps, up_ptr, adapters_ptr, y_ptr, out_ptr, T, shares,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, SLICES: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of N, shares): one program adds to a tile of y what rows of its adapters get, in turns
    with others. The sum over slices is rounded to y's type first, as if a layer had made it. GATE: silu(even columns) *
    odd columns of that, of all rows, goes to `out`, and y is left as it is."""
    let_next_start(PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    start_n = tl.program_id(1) * BLOCK_N
    columns = start_n + tl.arange(0, BLOCK_N)
    # What ran ahead of the product is done, since the kernel ahead of this one has begun.
    adapters = tl.load(adapters_ptr + rows, mask=rows < T, other=-1)
    adapter = _next_adapter(adapters, -2 if GATE else -1)
    if PDL and N % BLOCK_N == 0:
        first = tl.max(adapters, 0)
        if first >= 0 and tl.program_id(2) == 0:
            prefetch(up_ptr + (first.to(tl.int64) * N + start_n) * Q, 1, BLOCK_N * Q, BLOCK_N * Q)
    wait_for_previous(PDL)
    low_rows = low_ptr + rows.to(tl.int64)[:, None] * R
    y_tile = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    module = columns % 2 if START1 == 1 else (columns >= START1).to(tl.int32) + (columns >= START2).to(tl.int32)
    turn = 0
    while adapter >= -1:
        if turn % shares == tl.program_id(2):
            own = adapters == adapter
            mask = own[:, None] & (columns < N)[None, :] & (rows < T)[:, None]
            y = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
            if adapter >= 0:
                scale = tl.full([BLOCK_T], 1.0, tl.float32)
                if NORM:
                    squares = tl.zeros([BLOCK_T], tl.float32)
                    for part in tl.static_range(SLICES):
                        squares += tl.load(squares_ptr + part * T + rows, mask=own, other=0.0)
                    scale = tl.rsqrt(squares / K + eps)
                up = up_ptr + adapter.to(tl.int64) * (N * Q) + columns[None, :] * Q
                total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
                for which in tl.static_range(R // Q):
                    if _has_columns(start_n, BLOCK_N, which, START1, START2, N):
                        theirs = (module == which) & (columns < N)
                        for start in range(0, Q, BLOCK_Q):
                            ranks = start + tl.arange(0, BLOCK_Q)
                            inside = own[:, None] & (ranks < Q)[None, :]
                            low = tl.zeros([BLOCK_T, BLOCK_Q], tl.float32)
                            for part in tl.static_range(SLICES):
                                places = low_rows + part * T.to(tl.int64) * R + which * Q + ranks[None, :]
                                low += tl.load(places, mask=inside, other=0.0)
                            if NORM:
                                low *= scale[:, None]
                            weights = tl.load(
                                up + ranks[:, None], mask=(ranks < Q)[:, None] & theirs[None, :], other=0.0
                            )
                            total = tl.dot(low.to(weights.dtype), weights, total, input_precision="ieee")
                y += total
            if GATE:
                rounded = y.to(y_ptr.dtype.element_ty).to(tl.float32)
                gate, up_side = tl.split(tl.reshape(rounded, [BLOCK_T, BLOCK_N // 2, 2]))
                gated = gate / (1.0 + tl.exp(-gate)) * up_side
                halves = start_n // 2 + tl.arange(0, BLOCK_N // 2)
                places = out_ptr + rows.to(tl.int64)[:, None] * (N // 2) + halves[None, :]
                there = own[:, None] & (halves < N // 2)[None, :] & (rows < T)[:, None]
                tl.store(places, gated.to(out_ptr.dtype.element_ty), mask=there)
            else:
                tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=mask)
        adapter = _next_adapter(adapters, adapter)
        turn += 1


class Addition:
    """What adapters make of rows of x (normed, if there is a norm), to be added to what a product makes of them.

    Made before the product: what that frees is not to be had while it is in use. Where the product's kernels are
    launched within `next_starts_late`, the first of this runs beside them.
    """

    def __init__(
        self, x_TK: Tensor, low_rank: LowRank, adapters_T: Tensor, norm: Norm | None = None, *, deterministic: bool
    ) -> None:
        """`deterministic`: a row's bits do not depend on T."""
        low_rank.check()
        (A, R, K), T = low_rank.down_ARK.shape, len(x_TK)
        check_shape("x", x_TK, T, K)
        check_same("x", x_TK, low_rank.down_ARK)
        check_indices("adapters", adapters_T, x_TK, T)
        if norm is not None:
            check_shape("norm", norm.weight_K, K)
            check_same("norm", norm.weight_K, x_TK)
        self._x_TK, self._low_rank, self._adapters_T, self._norm = x_TK, low_rank, adapters_T, norm
        self._rank = R // len(low_rank.starts)
        many = T > _MANY_ROWS and not deterministic
        self._slices = 1 if many else cdiv(K, _SLICE)
        if not use_kernels(x_TK):
            return
        block_t = 64 if many else 16 if deterministic else min(max(16, next_power_of_2(T)), 64)
        self._shares = 1 if T > _MANY_ROWS else min(A, T, _MOST_SHARES)
        self._options = {
            "BLOCK_T": block_t, "SLICES": self._slices, "NORM": norm is not None, "num_warps": 4,
            **overlap_options(x_TK),
        }  # fmt: skip
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
            add_low_rank_reference(y_TN, x_TK, low_rank, self._adapters_T, self._norm)
            return silu_and_mul_reference(y_TN[:, ::2], y_TN[:, 1::2]) if gate else y_TN
        out = y_TN.new_empty(T, N // 2) if gate else y_TN
        if T:
            self._shrink()
            self._expand(y_TN, out, gate=gate)
        return out

    def _shrink(self) -> None:
        x_TK, down_ARK, norm = self._x_TK, self._low_rank.down_ARK, self._norm
        T, (_, R, K), many = len(x_TK), down_ARK.shape, self._slices == 1
        block_t = self._options["BLOCK_T"]
        block_k = 32 if x_TK.element_size() == 4 else 128 if many or block_t == 64 else 256
        block_r = min(next_power_of_2(R), 64) if many else _block(self._rank)
        _shrink_kernel[(cdiv(T, block_t), cdiv(R, block_r) * self._slices, self._shares)](
            x_TK, x_TK if norm is None else norm.weight_K, down_ARK, self._adapters_T, self._low_STR, self._squares_ST,
            T, self._shares, K=K, R=R, BLOCK_R=block_r, BLOCK_K=block_k, WIDTH=K if many else _SLICE, **self._options,
        )  # fmt: skip

    def _expand(self, y_TN: Tensor, out: Tensor, *, gate: bool) -> None:
        low_rank, (T, N), norm = self._low_rank, y_TN.shape, self._norm
        (_, R, K), starts = low_rank.down_ARK.shape, (*low_rank.starts, N, N)
        block_n = 64 if low_rank.up_ANQ.element_size() == 4 else 128
        grid = cdiv(T, self._options["BLOCK_T"]), cdiv(N, block_n), self._shares
        _expand_kernel[grid](
            self._low_STR, self._squares_ST, 0.0 if norm is None else norm.eps, low_rank.up_ANQ, self._adapters_T,
            y_TN, out, T, self._shares, K=K, N=N, R=R, Q=self._rank, START1=starts[1], START2=starts[2],
            BLOCK_N=block_n, BLOCK_Q=_block(self._rank), GATE=gate, **self._options,
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
