"""What the kernels for few decode rows make of a tile of old keys and values, and of the queries that see it.

Products are transposed: tokens, then the head's numbers, are their long side, and the queries the short.

Shape suffixes: T tokens of a tile, C queries of one kv head, D head size, two halves of which turn together.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.attention_prologue import norm_and_turn
from tercet.triton_kernels.cells import as_factor
from tercet.triton_kernels.partial_prologue import partner


@triton.jit
def load_halves(ptr, columns, HALF: tl.constexpr):
    return tl.load(ptr + columns).to(tl.float32), tl.load(ptr + HALF + columns).to(tl.float32)


@triton.jit
def load_turns(ptrs, columns, HALF: tl.constexpr, R: tl.constexpr):
    """Cosines and sines of a head's first half. Where few numbers turn, sines have the signs that partners get, and
    what does not turn has ones and zeros."""
    if R == 2 * HALF:
        cos, sin = load_halves(ptrs, columns, HALF)
    else:
        cos = tl.load(ptrs + columns % (R // 2), mask=columns < R, other=1.0)
        sin = tl.load(ptrs + R // 2 + columns % (R // 2), mask=columns < R, other=0.0)
        sin = tl.where(columns < R // 2, -sin, sin)
    return cos, sin


@triton.jit
def load_norms(ptr, columns, HALF: tl.constexpr, R: tl.constexpr):
    """The weights of a head's halves, and of partners, where few numbers turn."""
    norm0, norm1 = load_halves(ptr, columns, HALF)
    partners = norm0
    if R < 2 * HALF:
        partners = tl.load(ptr + partner(columns, R), mask=columns < R, other=0.0).to(tl.float32)
    return norm0, norm1, partners


@triton.jit
def turn_heads(
    x, y, partners, squares, norm0, norm1, norm2, cos, sin, eps, HALF: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr
):
    """Heads in two halves, normed and turned by their position; fp32, to be rounded once. `partners`: what numbers of
    the first half turn with, where no others turn."""
    if R == 2 * HALF:
        x, y = norm_and_turn(x, y, squares, norm0, norm1, cos, sin, eps, 2 * HALF, NORM)
    else:
        if NORM:
            inverse = tl.rsqrt(squares / (2 * HALF) + eps)
            x *= inverse * norm0
            y *= inverse * norm1
            partners *= inverse * norm2
        x = x * cos + partners * sin
    return x, y


@triton.jit
def load_queries(
    first_ptr, norm0, norm1, norm2, cos, sin, eps,
    G: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """C queries, G of each token, whose row has ROW numbers: normed, turned and rounded, in two halves, [C, HALF]."""
    queries = tl.arange(0, BLOCK_C)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    ptrs = first_ptr + queries * (2 * HALF)
    if C > G:
        ptrs += queries // G * (ROW - 2 * G * HALF)
    if BLOCK_C == C:
        x = tl.load(ptrs + columns)
        y = tl.load(ptrs + columns + HALF)
    else:
        x = tl.load(ptrs + columns, mask=queries < C, other=0.0)
        y = tl.load(ptrs + columns + HALF, mask=queries < C, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    partners = x
    if R < 2 * HALF:
        partners = tl.load(ptrs + partner(columns, R), mask=(queries < C) & (columns < R), other=0.0).to(tl.float32)
    squares = tl.sum(x * x + y * y, 1)[:, None]
    x, y = turn_heads(
        x, y, partners, squares, norm0[None, :], norm1[None, :], norm2[None, :], cos, sin, eps, HALF, R, NORM
    )
    return as_factor(x, dtype, CELL), as_factor(y, dtype, CELL)


@triton.jit
def pages_of(table_ptr, start, M, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The page of a tile, or of each of its tokens where a tile is longer."""
    positions = start if PAGE % TILE == 0 else start + tl.arange(0, TILE)
    return tl.load(table_ptr + tl.minimum(positions // PAGE, M - 1))


@triton.jit
def load_tile(
    k_ptr, v_ptr, pages, head, tile, inside,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys in two halves, [T, D / 2], and values, [T, D]: zeros where tokens are not `inside`."""
    HALF: tl.constexpr = D // 2
    tokens = tl.arange(0, TILE)
    if PAGE % TILE == 0:
        first_cell = (pages.to(tl.int64) * KV_HEADS + head) * PAGE + tile * TILE % PAGE
        offsets = (tokens.to(tl.int64) * D)[:, None]
    else:
        cells = (pages.to(tl.int64) * KV_HEADS + head) * PAGE + (tile * TILE + tokens) % PAGE
        first_cell = 0
        offsets = (cells * D)[:, None]
    k_ptrs = (k_ptr + first_cell * D) + (offsets + tl.arange(0, HALF)[None, :])
    k0 = tl.load(k_ptrs, mask=inside[:, None], other=0.0)
    k1 = tl.load(k_ptrs + HALF, mask=inside[:, None], other=0.0)
    v_ptrs = (v_ptr + first_cell * D) + (offsets + tl.arange(0, D)[None, :])
    return k0, k1, tl.load(v_ptrs, mask=inside[:, None], other=0.0)


@triton.jit
def hold(x, PDL: tl.constexpr):
    """Nothing is made of `x` above this: else the compiler has one load waited for before it asks for the next."""
    if PDL:
        numbers: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=numbers)
    return x


@triton.jit
def attend_to_tile(q0, q1, k0, k1, v, seen, acc, largest, weight, unit, SOME_SEE_NONE: tl.constexpr):
    """A tile's scores and values added to what there is of those before: sums [D, C], largest scores and weights [C].

    `seen`: by which queries, or by all. `SOME_SEE_NONE`: of this tile and of those before.
    """
    # Two chains of products, each half as long.
    k0, k1, v = k0.to(q0.dtype), k1.to(q0.dtype), v.to(q0.dtype)
    s = tl.dot(k0, tl.trans(q0)) * unit + tl.dot(k1, tl.trans(q1)) * unit
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(largest, tl.max(s, 0))
    base = tl.where(new == float("-inf"), 0.0, new) if SOME_SEE_NONE else new
    shrink = tl.exp2(largest - base)
    weights = tl.exp2(s - base[None, :])
    weight = weight * shrink + tl.sum(weights, 0)
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * shrink[None, :])
    return acc, new, weight


@triton.jit
def leave_part(
    part_ptr, stats_ptr, part, acc, largest, weight,
    COUNT: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store what a program has of its COUNT queries, to be merged."""
    queries = tl.arange(0, BLOCK_C)
    places = part * COUNT + queries
    mask = queries < COUNT
    tl.store(part_ptr + places[None, :] * D + tl.arange(0, D)[:, None], acc, mask=mask[None, :])
    tl.store(stats_ptr + places * 2, largest, mask=mask)
    tl.store(stats_ptr + places * 2 + 1, weight, mask=mask)
