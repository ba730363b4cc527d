"""From what a layer's first product makes of each token to a filled cache of latents, and what queries are made from.

A token's row has that first, then its latent, then the numbers of its key that turn.

Shape suffixes: T tokens, N numbers of a row, Q those that queries are made from, L those of a latent, R those that
turn, P positions; the cache is of one layer, [page, 1, token of the page, L + R].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm_reference
from tercet.triton_kernels.attention_prologue import check_places
from tercet.triton_kernels.checks import FLOATS, FP8, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.rotary import check_cos_sin, rotary_reference
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.write_kv import write_kv_reference

_SIZES = ["T", "num_cells", "P"]


@triton.jit
def turn(
    from_ptrs, to_ptrs, positions, cos_sin_ptr, P, inside, kept,
    R: tl.constexpr, BLOCK_HALF: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Numbers, one position a row, turned and rounded once; in halves, whichever way they came. [rows, 1] each."""
    HALF: tl.constexpr = R // 2
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    mask = inside & (columns < HALF)
    turn_ptrs = cos_sin_ptr + tl.minimum(tl.maximum(positions, 0), P - 1).to(tl.int64) * R + columns
    cos = tl.load(turn_ptrs, mask=mask, other=0.0)
    sin = tl.load(turn_ptrs + HALF, mask=mask, other=0.0)
    if IN_PAIRS:
        x = tl.load(from_ptrs + 2 * columns, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(from_ptrs + 2 * columns + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.load(from_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(from_ptrs + HALF + columns, mask=mask, other=0.0).to(tl.float32)
    dtype = to_ptrs.dtype.element_ty
    tl.store(to_ptrs + columns, (x * cos - y * sin).to(dtype), mask=mask & kept)
    tl.store(to_ptrs + HALF + columns, (y * cos + x * sin).to(dtype), mask=mask & kept)


@triton.jit
def _norm(from_ptr, weight_ptr, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One row, normed and not rounded."""
    columns = tl.arange(0, BLOCK_D)
    x = tl.load(from_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _latent_prologue_kernel(
    x_ptr, positions_ptr, kv_slots_ptr, cos_sin_ptr, latent_norm_ptr, query_norm_ptr, eps, cache_ptr, q_ptr, rows_ptr,
    T, num_cells, P,
    Q: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_HALF: tl.constexpr, IN_PAIRS: tl.constexpr, NORM: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program owns one token. A slot outside the cache is skipped."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    token = tl.program_id(0).to(tl.int64)
    if token < T:
        x_ptr += token * (Q + L + R)
        cell = tl.load(kv_slots_ptr + token)
        kept = (cell >= 0) & (cell < num_cells)
        columns = tl.arange(0, BLOCK_L)
        latent = _norm(x_ptr + Q, latent_norm_ptr, eps, L, BLOCK_L)
        cell_ptr = cache_ptr + cell * (L + R)
        tl.store(cell_ptr + columns, latent.to(cache_ptr.dtype.element_ty), mask=(columns < L) & kept)
        one = tl.arange(0, 1)[:, None]
        turn(
            x_ptr + Q + L + one, cell_ptr + L + one, tl.load(positions_ptr + token) + one, cos_sin_ptr, P, one == 0,
            kept, R, BLOCK_HALF, IN_PAIRS,
        )  # fmt: skip
        if NORM:
            columns = tl.arange(0, BLOCK_Q)
            q = _norm(x_ptr, query_norm_ptr, eps, Q, BLOCK_Q)
            tl.store(q_ptr + token * Q + columns, q.to(q_ptr.dtype.element_ty), mask=columns < Q)


def latent_prologue(
    x_TN: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    cos_sin_PR: Tensor,
    latent_norm_L: Tensor,
    query_norm_Q: Tensor | None,
    eps: float,
    cache: Tensor,
    *,
    in_pairs: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """[T, Q + L + R] -> [T, Q], normed if there is a norm, else a view of `x_TN`. Latents, normed, and behind them the
    numbers that turn, turned, go into the cache at `kv_slots_T`.

    `in_pairs`: of the numbers that turn neighbours do together; in the cache they lie in halves all the same. `rows`:
    how many tokens there are in truth, int32 [1] on the device; those behind may be left as they are. fp32 inside,
    rounded once. Graph-safe.
    """
    num_pages, _, page_size, D = cache.shape
    T, N = x_TN.shape
    L, R = len(latent_norm_L), cos_sin_PR.shape[1]
    check_dtype("x", x_TN, *FLOATS)
    check_contiguous("x", x_TN)
    check_shape("cache", cache, None, 1, None, L + R)
    check_same("cache", cache, x_TN, FP8)
    check_cos_sin(cos_sin_PR, x_TN, R)
    if N <= D:
        raise ValueError(f"x: got rows of {N}, wanted more than the cache's {D}")
    for name, norm, size in (("latent_norm", latent_norm_L, L), ("query_norm", query_norm_Q, N - D)):
        if norm is not None:
            check_shape(name, norm, size)
            check_same(name, norm, x_TN, torch.float32)
    check_places(x_TN, positions_T, kv_slots_T, rows)
    if not use_kernels(x_TN):
        return latent_prologue_reference(
            x_TN, positions_T, kv_slots_T, cos_sin_PR, latent_norm_L, query_norm_Q, eps, cache, in_pairs=in_pairs
        )
    Q = N - D
    normed = query_norm_Q is not None
    q_TQ = torch.empty(T, Q, dtype=x_TN.dtype, device=x_TN.device) if normed else x_TN[:, :Q]
    if T:
        block_q, block_l = next_power_of_2(Q) if normed else 1, next_power_of_2(L)
        _latent_prologue_kernel[(T,)](
            x_TN, positions_T, kv_slots_T, cos_sin_PR, latent_norm_L,
            latent_norm_L if query_norm_Q is None else query_norm_Q, eps, cache, q_TQ,
            positions_T if rows is None else rows, T, num_pages * page_size, cos_sin_PR.shape[0],
            Q=Q, L=L, R=R, BLOCK_Q=block_q, BLOCK_L=block_l, BLOCK_HALF=next_power_of_2(R // 2), IN_PAIRS=in_pairs,
            NORM=normed, HAS_ROWS=rows is not None, num_warps=4, **overlap_options(x_TN),
        )  # fmt: skip
    return q_TQ


def latent_prologue_reference(
    x_TN: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    cos_sin_PR: Tensor,
    latent_norm_L: Tensor,
    query_norm_Q: Tensor | None,
    eps: float,
    cache: Tensor,
    *,
    in_pairs: bool,
) -> Tensor:
    """The same, step by step."""
    L, R = len(latent_norm_L), cos_sin_PR.shape[1]
    q_TQ, latent_TL, turned_TR = x_TN.split((x_TN.shape[1] - L - R, L, R), 1)
    turned_T1R = turned_reference(turned_TR[:, None], positions_T, cos_sin_PR, in_pairs=in_pairs)
    latent_TL = rms_norm_reference(latent_TL.contiguous(), latent_norm_L, eps)
    rows_T1D = torch.cat((latent_TL[:, None], turned_T1R), 2)
    write_kv_reference(rows_T1D, rows_T1D, cache, cache, kv_slots_T)
    return q_TQ if query_norm_Q is None else rms_norm_reference(q_TQ.contiguous(), query_norm_Q, eps)


def turned_reference(x_THR: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, in_pairs: bool) -> Tensor:
    """Heads of numbers that turn, turned, in halves."""
    x_THR = torch.cat((x_THR[..., ::2], x_THR[..., 1::2]), -1) if in_pairs else x_THR.contiguous().clone()
    rotary_reference(x_THR, x_THR[:, :0], positions_T, cos_sin_PR)
    return x_THR
