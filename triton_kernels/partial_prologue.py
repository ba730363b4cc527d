"""`attention_prologue` where only the first numbers of a head turn: one program owns a token, and a row a head.

A row lies in one layout from its load to its store, and so do the numbers that it turns with: those of two layouts
would be spread over all threads again and again.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.overlap import let_next_start, wait_for_previous

_SIZES = ["T", "num_cells", "P", "first_row"]


@triton.jit
def partner(columns, R: tl.constexpr):
    """Of numbers that turn within the first R, where the one is that each turns with."""
    return (columns + R // 2) % R


@triton.jit
def _load_heads(
    from_ptrs, inside, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Heads, beside each number that turns its partner, and the halves that turn once more, to be summed up."""
    HALF: tl.constexpr = R // 2
    columns, few = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_HALF)[None, :]
    turning = tl.load(from_ptrs + columns, mask=inside & (columns < R), other=0.0)
    rest = tl.load(from_ptrs + columns, mask=inside & (columns >= R) & (columns < D), other=0.0)
    partners = tl.load(from_ptrs + partner(columns, R), mask=inside & (columns < R), other=0.0)
    x, y = turning, turning
    if NORM:
        x = tl.load(from_ptrs + few, mask=inside & (few < HALF), other=0.0)
        y = tl.load(from_ptrs + HALF + few, mask=inside & (few < HALF), other=0.0)
    return turning, rest, partners, x, y


@triton.jit
def _turn(
    loaded, norm, partners_norm, cos, sin, eps, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Normed and turned; fp32. Squares are summed up as they are by `attention_prologue`'s other kernel."""
    turning, rest, partners = loaded[0].to(tl.float32), loaded[1].to(tl.float32), loaded[2].to(tl.float32)
    turns = tl.arange(0, BLOCK_D)[None, :] < R
    heads = tl.where(turns, turning, rest)
    if NORM:
        x, y = loaded[3].to(tl.float32), loaded[4].to(tl.float32)
        squares = tl.sum(x * x + y * y, 1)
        squares += tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        heads *= inverse * norm
        partners *= inverse * partners_norm
    return tl.where(turns, heads * cos + partners * sin, heads)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def partial_prologue_kernel(
    qkv_ptr, positions_ptr, kv_slots_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps, k_cache_ptr, v_cache_ptr, q_ptr,
    rows_ptr, T, num_cells, P, first_row,
    H: tl.constexpr, KV_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,), from the last token to the first."""
    let_next_start(PDL)
    HALF: tl.constexpr = R // 2
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr) - first_row)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    real = token < T
    # Where tokens stand is in the plan, which may be read before the wait.
    position = tl.minimum(tl.maximum(tl.load(positions_ptr + token, mask=real, other=0), 0), P - 1).to(tl.int64)
    cell = tl.load(kv_slots_ptr + token, mask=real, other=-1).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)[None, :]
    turns = columns < R
    turn_ptrs = cos_sin_ptr + position * R + columns % HALF
    cos = tl.load(turn_ptrs, mask=turns, other=1.0)
    sin = tl.load(turn_ptrs + HALF, mask=turns, other=0.0)
    sin = tl.where(columns < HALF, -sin, sin)
    q_norm, q_partners = 1.0, 1.0
    k_norm, k_partners = 1.0, 1.0
    if NORM:
        q_norm = tl.load(q_norm_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        q_partners = tl.load(q_norm_ptr + partner(columns, R), mask=turns, other=0.0).to(tl.float32)
        k_norm = tl.load(k_norm_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        k_partners = tl.load(k_norm_ptr + partner(columns, R), mask=turns, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if real:
        heads, kv_heads = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_KV)[:, None]
        token_ptr = qkv_ptr + token * ROW
        # All loads go ahead of all stores, which nothing passes.
        q = _load_heads(token_ptr + heads * D, heads < H, D, R, BLOCK_D, BLOCK_HALF, NORM)
        k = _load_heads(token_ptr + (H + kv_heads) * D, kv_heads < KV_HEADS, D, R, BLOCK_D, BLOCK_HALF, NORM)
        of_kv = (kv_heads < KV_HEADS) & (columns < D)
        v = tl.load(token_ptr + (H + KV_HEADS + kv_heads) * D + columns, mask=of_kv, other=0.0)
        kept = of_kv & (cell >= 0) & (cell < num_cells)
        places = (cell // PAGE * KV_HEADS * PAGE + cell % PAGE) * D + kv_heads * (PAGE * D) + columns
        q_ptrs = q_ptr + token * (H * D) + heads * D + columns
        turned = _turn(q, q_norm, q_partners, cos, sin, eps, D, R, BLOCK_D, NORM)
        tl.store(q_ptrs, turned.to(q_ptr.dtype.element_ty), mask=(heads < H) & (columns < D))
        turned = _turn(k, k_norm, k_partners, cos, sin, eps, D, R, BLOCK_D, NORM)
        tl.store(k_cache_ptr + places, turned.to(k_cache_ptr.dtype.element_ty), mask=kept)
        tl.store(v_cache_ptr + places, v.to(v_cache_ptr.dtype.element_ty), mask=kept)
