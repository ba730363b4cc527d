"""Between latents and heads: queries brought to where latents are, and what is attended to there brought back.

A head's key is made from a latent by one matrix and its value by another. A query times a key is the query times that
matrix, times the latent: so latents are attended to as they lie in the cache, for all heads, and sums of them become
sums of values at the end.

Shape suffixes: T tokens, H heads, L numbers of a latent, S numbers of a head's key that are made from one, V of its
value, X both, R those of a head that turn, P positions.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.latent_prologue import turn, turned_reference
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.rotary import check_cos_sin
from tercet.triton_kernels.tiles import cdiv, dot_block, next_power_of_2

_FEW, _MANY = (16, 32, 512), (64, 128, 64)
"""Tokens of a program, numbers that it makes of each, and those it reads at once. Few tokens want small tiles, so that
there are more of them; of up to 16 a program loads all that it needs of a matrix before it waits for the kernel ahead.
A token's bits follow none of them: a product sums in the same order in tiles of any size."""
_QUERY_TILES = {16: _FEW, 2**31: _MANY}
_VALUE_TILES = {16: _FEW, 128: (64, 32, 128), 512: (64, 64, 64), 2**31: _MANY}
"""By tokens at most."""


@triton.jit(do_not_specialize=["T", "stride", "P"], do_not_specialize_on_alignment=["T", "P"])
def _queries_kernel(
    x_ptr, up_ptr, positions_ptr, cos_sin_ptr, out_ptr, rows_ptr, few_ptr, T, stride, P,
    H: tl.constexpr, S: tl.constexpr, X: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_HALF: tl.constexpr, IN_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (L / BLOCK_L, H, T / BLOCK_T): one program owns BLOCK_L numbers of one head's queries; the first also turns
    what is behind them."""
    let_next_start(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    few = T
    if HAS_FEW:
        few = tl.minimum(T, tl.load(few_ptr))
    first = tl.program_id(2) * BLOCK_T
    turns = (tl.program_id(0) == 0) & (first < T)
    # Who has nothing to do makes room; but not all: the next kernel would find this one at its end too soon.
    if (first >= few) & ~turns & (tl.program_id(0) + tl.program_id(1) + tl.program_id(2) > 0):
        return
    head = tl.program_id(1)
    tokens = first + tl.arange(0, BLOCK_T)
    inside = (tokens < T)[:, None]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * stride + head * (S + R)
    out_ptrs = out_ptr + (tokens.to(tl.int64) * H + head)[:, None] * (L + R)
    columns = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)[None, :]
    numbers = tl.arange(0, BLOCK_S)
    up_ptrs = up_ptr + (head * X + numbers).to(tl.int64)[:, None] * L + columns
    up = tl.load(up_ptrs, mask=(numbers < S)[:, None] & (columns < L) & (first < few), other=0.0)
    wait_for_previous(PDL)
    if first < few:
        x = tl.load(x_ptrs + numbers[None, :], mask=inside & (numbers < S)[None, :], other=0.0)
        acc = tl.dot(x, up, input_precision=PRECISION)
        for start in range(BLOCK_S, S, BLOCK_S):
            more = (start + numbers) < S
            x = tl.load(x_ptrs + (start + numbers)[None, :], mask=inside & more[None, :], other=0.0)
            up = tl.load(up_ptrs + start * L, mask=more[:, None] & (columns < L), other=0.0)
            acc = tl.dot(x, up, acc, input_precision=PRECISION)
        tl.store(out_ptrs + columns, acc.to(out_ptr.dtype.element_ty), mask=inside & (columns < L))
    if turns:
        positions = tl.load(positions_ptr + tokens[:, None], mask=inside, other=0)
        turn(x_ptrs + S, out_ptrs + L, positions, cos_sin_ptr, P, inside, inside, R, BLOCK_HALF, IN_PAIRS)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["T"])
def _values_kernel(
    x_ptr, up_ptr, out_ptr, rows_ptr, T,
    H: tl.constexpr, S: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr, PRECISION: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (V / BLOCK_V, H, T / BLOCK_T): one program owns BLOCK_V numbers of one head's values."""
    let_next_start(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    first = tl.program_id(2) * BLOCK_T
    if (first >= T) & (tl.program_id(0) + tl.program_id(1) + tl.program_id(2) > 0):
        return
    head = tl.program_id(1)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    numbers = tl.arange(0, BLOCK_L)
    up_ptrs = up_ptr + (head * (S + V) + S + values).to(tl.int64)[None, :] * L + numbers[:, None]
    up = tl.load(up_ptrs, mask=(values < V)[None, :] & (numbers < L)[:, None], other=0.0)
    wait_for_previous(PDL)
    tokens = first + tl.arange(0, BLOCK_T)
    inside = (tokens < T)[:, None]
    places = (tokens.to(tl.int64) * H + head)[:, None]
    x_ptrs = x_ptr + places * L + numbers[None, :]
    x = tl.load(x_ptrs, mask=inside & (numbers < L)[None, :], other=0.0)
    acc = tl.dot(x, up, input_precision=PRECISION)
    for start in range(BLOCK_L, L, BLOCK_L):
        more = (start + numbers) < L
        x = tl.load(x_ptrs + start, mask=inside & more[None, :], other=0.0)
        up = tl.load(up_ptrs + start, mask=(values < V)[None, :] & more[:, None], other=0.0)
        acc = tl.dot(x, up, acc, input_precision=PRECISION)
    mask = inside & (values < V)[None, :]
    tl.store(out_ptr + places * V + values[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def latent_queries(
    q_TQ: Tensor, up_HXL: Tensor, num_still: int, positions_T: Tensor, cos_sin_PR: Tensor, *, in_pairs: bool,
    rows: Tensor | None = None, few: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[T, H (S + R)] -> [T, H, L + R]: of each head the first S numbers times the first `num_still` rows of its
    matrix, and the others turned, in halves. Rows of q may be part of longer ones. fp32 inside, rounded once.

    `in_pairs`, `rows`: as in `latent_prologue`; `few`: like `rows`, of how many tokens the first numbers are wanted.
    Both are read before the wait (see overlap.py). Graph-safe.
    """
    H, X, L = up_HXL.shape
    T, R = len(q_TQ), cos_sin_PR.shape[1]
    check_dtype("q", q_TQ, *FLOATS)
    check_shape("q", q_TQ, None, H * (num_still + R))
    check_same("up", up_HXL, q_TQ)
    check_shape("positions", positions_T, T)
    check_cos_sin(cos_sin_PR, q_TQ, R)
    if T and q_TQ.stride(1) != 1:
        raise ValueError(f"q: got strides {list(q_TQ.stride())}, wanted 1 for the last dimension")
    if not 0 < num_still < X:
        raise ValueError(f"num_still: got {num_still}, wanted a part of the {X} rows of a head's matrix")
    if not use_kernels(q_TQ):
        return latent_queries_reference(q_TQ, up_HXL, num_still, positions_T, cos_sin_PR, in_pairs=in_pairs)
    out_THD = torch.empty(T, H, L + R, dtype=q_TQ.dtype, device=q_TQ.device)
    if T:
        block_t, block_l, block_s = _tile(_QUERY_TILES, q_TQ, L, num_still)
        _queries_kernel[(cdiv(L, block_l), H, cdiv(T, block_t))](
            q_TQ, up_HXL, positions_T, cos_sin_PR, out_THD, positions_T if rows is None else rows,
            positions_T if few is None else few, T, q_TQ.stride(0), cos_sin_PR.shape[0],
            H=H, S=num_still, X=X, L=L, R=R, BLOCK_T=block_t, BLOCK_L=block_l, BLOCK_S=block_s,
            BLOCK_HALF=next_power_of_2(R // 2), IN_PAIRS=in_pairs, PRECISION=_precision(q_TQ),
            HAS_ROWS=rows is not None, HAS_FEW=few is not None, num_warps=4, **overlap_options(q_TQ),
        )  # fmt: skip
    return out_THD


def latent_values(attended_THL: Tensor, up_HXL: Tensor, num_still: int, rows: Tensor | None = None) -> Tensor:
    """[T, H, L] -> [T, H, V]: times the rows of each head's matrix that are behind the first `num_still`. fp32 inside,
    rounded once; graph-safe. `rows`: as in `latent_queries`."""
    H, X, L = up_HXL.shape
    T, V = len(attended_THL), X - num_still
    check_dtype("attended", attended_THL, *FLOATS)
    check_shape("attended", attended_THL, None, H, L)
    check_contiguous("attended", attended_THL)
    check_same("up", up_HXL, attended_THL)
    if not 0 < num_still < X:
        raise ValueError(f"num_still: got {num_still}, wanted a part of the {X} rows of a head's matrix")
    if not use_kernels(attended_THL):
        return latent_values_reference(attended_THL, up_HXL, num_still)
    out_THV = torch.empty(T, H, V, dtype=attended_THL.dtype, device=attended_THL.device)
    if T:
        block_t, block_v, block_l = _tile(_VALUE_TILES, attended_THL, V, L)
        _values_kernel[(cdiv(V, block_v), H, cdiv(T, block_t))](
            attended_THL, up_HXL, out_THV, up_HXL if rows is None else rows, T,
            H=H, S=num_still, V=V, L=L, BLOCK_T=block_t, BLOCK_V=block_v, BLOCK_L=block_l,
            PRECISION=_precision(attended_THL), HAS_ROWS=rows is not None, num_warps=4,
            **overlap_options(attended_THL),
        )  # fmt: skip
    return out_THV


def _tile(
    tiles: Mapping[int, tuple[int, int, int]], x: Tensor, num_out: int, num_in: int
) -> tuple[int, int, int]:  # fmt: skip
    block_t, block_out, block_in = next(tile for most, tile in tiles.items() if len(x) <= most)
    return block_t, min(block_out, dot_block(num_out)), min(block_in * 2 // x.itemsize, dot_block(num_in))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def latent_queries_reference(
    q_TQ: Tensor, up_HXL: Tensor, num_still: int, positions_T: Tensor, cos_sin_PR: Tensor, *, in_pairs: bool
) -> Tensor:
    """The same in PyTorch."""
    q_THX = q_TQ.unflatten(1, (len(up_HXL), -1))
    queries_THL = torch.einsum("ths,hsl->thl", q_THX[..., :num_still].float(), up_HXL[:, :num_still].float())
    turned_THR = turned_reference(q_THX[..., num_still:], positions_T, cos_sin_PR, in_pairs=in_pairs)
    return torch.cat((queries_THL.to(q_TQ.dtype), turned_THR), 2)


def latent_values_reference(attended_THL: Tensor, up_HXL: Tensor, num_still: int) -> Tensor:
    """The same in PyTorch."""
    values_THV = torch.einsum("thl,hvl->thv", attended_THL.float(), up_HXL[:, num_still:].float())
    return values_THV.to(attended_THL.dtype)
