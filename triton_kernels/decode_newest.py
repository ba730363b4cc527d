"""How decode attention on Hopper begins with a row and a kv head, in Gluon: its queries and its newest token.

That token needs no cache: its norms and turns are computed where it is attended to, and written on the way.

Shape suffixes: D head size, R how many of a head's numbers turn: all, or of the first half the first; a row's heads are
q heads, then k heads, then v heads.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.decode_cells import as_cached, as_factor, even_first
from tercet.triton_kernels.overlap import wait_for_previous
from tercet.triton_kernels.partial_prologue import partner
from tercet.triton_kernels.sinks import load_sinks


@gluon.constexpr_function
def group_columns(num_heads):
    """Columns of a matrix product for so many q heads of one kv head: what the matrix units take at least."""
    return 8 if num_heads <= 8 else 16


@gluon.jit
def exp2(x):
    """2^x; what would be denormal is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def page_of(page_table_ptr, slot, tile, M, TILE: gl.constexpr, PAGE: gl.constexpr):
    return gl.load(page_table_ptr + slot.to(gl.int64) * M + gl.minimum(tile * TILE // PAGE, M - 1))


@gluon.jit
def _load_halves(ptr, columns, HALF: gl.constexpr):
    return gl.load(ptr + columns).to(gl.float32), gl.load(ptr + HALF + columns).to(gl.float32)


@gluon.jit
def _store_halves(ptr, columns, x, y, mask, HALF: gl.constexpr):
    gl.store(ptr + columns, x.to(ptr.dtype.element_ty), mask=mask)
    gl.store(ptr + HALF + columns, y.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _load_turns(ptr, columns, HALF: gl.constexpr, R: gl.constexpr):
    """Cosines and sines of a head's first half. Where few numbers turn, sines have the signs that partners get, and
    what does not turn has ones and zeros."""
    if R == 2 * HALF:
        cos, sin = _load_halves(ptr, columns, HALF)
    else:
        ptrs = ptr + columns % (R // 2)
        cos = gl.load(ptrs, mask=columns < R, other=1.0)
        sin = gl.load(ptrs + R // 2, mask=columns < R, other=0.0)
        sin = gl.where(columns < R // 2, -sin, sin)
    return cos, sin


@gluon.jit
def _load_norms(ptr, columns, HALF: gl.constexpr, R: gl.constexpr):
    """The weights of a head's halves, and of partners, where few numbers turn."""
    norm0, norm1 = _load_halves(ptr, columns, HALF)
    partners = norm0
    if R < 2 * HALF:
        partners = gl.load(ptr + partner(columns, R), mask=columns < R, other=0.0).to(gl.float32)
    return norm0, norm1, partners


@gluon.jit
def _turn(
    x, y, partners, squares, norm0, norm1, norm_of_partners, cos, sin, eps,
    HALF: gl.constexpr, R: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Heads in two halves, normed and turned by their position; fp32, to be rounded once. `partners`: what numbers of
    the first half turn with, where no others turn."""
    if NORM:
        inverse = gl.rsqrt(squares / (2 * HALF) + eps)
        x *= inverse * norm0
        y *= inverse * norm1
        partners *= inverse * norm_of_partners
    if R == 2 * HALF:
        return x * cos - y * sin, y * cos + x * sin
    return x * cos + partners * sin, y


@gluon.jit
def _norm_value(x, y, eps, HALF: gl.constexpr):
    """A value in two halves, normed without a weight; fp32, to be rounded once."""
    x = x.to(gl.float32)
    y = y.to(gl.float32)
    inverse = gl.rsqrt(gl.sum(x * x + y * y, 0) / (2 * HALF) + eps)
    return x * inverse, y * inverse


@gluon.jit
def _spread_heads(q, GROUP: gl.constexpr, MMA: gl.constexpr):
    """A group's heads as the columns of a matrix product, again and again: of the sums only the group's are used."""
    LAYOUT: gl.constexpr = q.type.layout.parent
    copies, _ = gl.broadcast(gl.expand_dims(q, 0), gl.zeros((GROUP // q.shape[0], 1, 1), gl.int32, LAYOUT))
    columns = gl.permute(gl.reshape(copies, (GROUP, q.shape[1])), (1, 0))
    return gl.convert_layout(columns, gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def _spread_scores(score, GROUP: gl.constexpr, MMA: gl.constexpr):
    """A score of each head for the same columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    score = gl.convert_layout(score, gl.SliceLayout(0, LAYOUT))
    copies, _ = gl.broadcast(score[None, :], gl.zeros((GROUP // score.shape[0], 1), gl.int32, LAYOUT))
    return gl.convert_layout(gl.reshape(copies, (GROUP,)), gl.SliceLayout(0, MMA))


@gluon.jit
def _attend_newest(
    q0, q1, key0, key1, v0, v1, sinks, is_last, unit,
    TILE: gl.constexpr, GROUP: gl.constexpr, MMA: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """The softmax before any tile: of the newest token and the heads' sinks, if `is_last`; else of nothing.

    No branch around it: the loads of what it needs would move there, behind those of the queries.
    """
    HALF: gl.constexpr = q0.shape[1]
    products = q0.to(gl.float32) * key0.to(gl.float32)[None, :]
    products += q1.to(gl.float32) * key1.to(gl.float32)[None, :]
    score = gl.where(is_last, gl.sum(products, 1) * unit, float("-inf"))
    largest = _spread_scores(score, GROUP, MMA)
    token = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    first = gl.where(token == 0, is_last.to(gl.float32), 0.0)
    weight = gl.zeros((TILE, GROUP), gl.float32, MMA) + first[:, None]
    acc0 = gl.zeros((HALF, GROUP), gl.float32, MMA)
    acc1 = gl.zeros((HALF, GROUP), gl.float32, MMA)
    acc0 += gl.convert_layout(even_first(v0, PAIRED), gl.SliceLayout(1, MMA)).to(gl.float32)[:, None]
    acc1 += gl.convert_layout(even_first(v1, PAIRED), gl.SliceLayout(1, MMA)).to(gl.float32)[:, None]
    if sinks is not None:
        newest = largest
        sinks = gl.where(is_last, sinks, float("-inf"))
        largest = gl.maximum(newest, sinks)
        # Of nothing the largest score is not finite.
        finite = gl.where(is_last, largest, 0.0)
        own = exp2(newest - finite)
        weight = first[:, None] * (own + exp2(sinks - finite))[None, :]
        acc0 *= own[None, :]
        acc1 *= own[None, :]
    return acc0, acc1, largest, weight


@gluon.jit
def begin_pair(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, page_table_ptr, sinks_ptr, k_ptr, v_ptr, row, slot, known,
    head, is_last, eps, unit, M, P, num_pages, H: gl.constexpr, KV_HEADS: gl.constexpr, ROW: gl.constexpr,
    D: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, NORM: gl.constexpr,
    NORM_VALUES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A row's queries of one kv head, and the softmax before any tile: if `is_last`, of the newest token, which is
    written on the way, and of the heads' sinks, where they have some; else of nothing. Waits for the kernel ahead; from
    the second time on for nothing."""
    HALF: gl.constexpr = D // 2
    G: gl.constexpr = H // KV_HEADS
    GROUP: gl.constexpr = group_columns(G)
    cell: gl.constexpr = k_ptr.dtype.element_ty
    PAIRED: gl.constexpr = cell == gl.float8e4nv
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LOADS: gl.constexpr = gl.SliceLayout(
        0, gl.BlockedLayout([1, 1, 8], [1, 256 // HALF, HALF // 8], [1, 1, 1], [2, 1, 0])
    )
    HEADS: gl.constexpr = triton.next_power_of_2(G)
    columns = gl.arange(0, HALF, gl.SliceLayout(0, LOADS))
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, LOADS))
    turn = known
    if shifts_ptr is not None:
        turn += gl.load(shifts_ptr + slot)
    cos, sin = _load_turns(cos_sin_ptr + gl.minimum(turn, P - 1).to(gl.int64) * R, columns, HALF, R)
    q_norm0, q_norm1, q_norm2 = _load_norms(q_norm_ptr, columns, HALF, R)
    k_norm0, k_norm1, k_norm2 = _load_norms(k_norm_ptr, columns, HALF, R)
    own_page = page_of(page_table_ptr, slot, known // TILE, M, TILE, PAGE).to(gl.int64)
    sinks = None
    if sinks_ptr is not None:
        group = gl.arange(0, GROUP, gl.SliceLayout(0, MMA))
        sinks = load_sinks(sinks_ptr + head * G, group, group < G)
    # Up to here nothing was read that the kernel ahead writes.
    wait_for_previous(PDL)
    heads_ptr = qkv_ptr + row * ROW
    first_ptrs = heads_ptr + (head * G + heads)[:, None] * D
    q_ptrs = first_ptrs + columns[None, :]
    mine = (heads < G)[:, None] & (columns < HALF)[None, :]
    x0 = gl.load(q_ptrs, mask=mine, other=0.0).to(gl.float32)
    x1 = gl.load(q_ptrs + HALF, mask=mine, other=0.0).to(gl.float32)
    k_ptrs = heads_ptr + (H + head) * D + columns
    wanted = is_last & (columns < HALF)
    k0 = gl.load(k_ptrs, mask=wanted, other=0.0).to(gl.float32)
    k1 = gl.load(k_ptrs + HALF, mask=wanted, other=0.0).to(gl.float32)
    q_partners = x0
    k_partners = k0
    if R < D:
        places = partner(columns, R)
        q_partners = gl.load(first_ptrs + places[None, :], mask=mine & (columns < R)[None, :], other=0.0)
        k_partners = gl.load(heads_ptr + (H + head) * D + places, mask=wanted & (columns < R), other=0.0)
        q_partners = q_partners.to(gl.float32)
        k_partners = k_partners.to(gl.float32)
    v0 = gl.load(k_ptrs + KV_HEADS * D, mask=wanted, other=0.0)
    v1 = gl.load(k_ptrs + KV_HEADS * D + HALF, mask=wanted, other=0.0)
    q0, q1 = _turn(
        x0, x1, q_partners, gl.sum(x0 * x0 + x1 * x1, 1)[:, None], q_norm0[None, :], q_norm1[None, :],
        q_norm2[None, :], cos[None, :], sin[None, :], eps, HALF, R, NORM,
    )  # fmt: skip
    q0 = as_factor(q0, cell)
    q1 = as_factor(q1, cell)
    squares = gl.sum(k0 * k0 + k1 * k1, 0)
    k0, k1 = _turn(k0, k1, k_partners, squares, k_norm0, k_norm1, k_norm2, cos, sin, eps, HALF, R, NORM)
    key0 = as_cached(k0, cell)
    key1 = as_cached(k1, cell)
    if NORM_VALUES:
        v0, v1 = _norm_value(v0, v1, eps, HALF)
    v0 = as_cached(v0, cell)
    v1 = as_cached(v1, cell)
    acc0, acc1, largest, weight = _attend_newest(
        q0, q1, key0, key1, v0, v1, sinks, is_last, unit, TILE, GROUP, MMA, PAIRED
    )
    place = ((own_page * KV_HEADS + head) * PAGE + known % PAGE) * D
    written = wanted & (own_page > 0) & (own_page < num_pages)
    _store_halves(k_ptr + place, columns, key0, key1, written, HALF)
    _store_halves(v_ptr + place, columns, v0, v1, written, HALF)
    q0 = _spread_heads(even_first(q0, PAIRED), GROUP, MMA)
    q1 = _spread_heads(even_first(q1, PAIRED), GROUP, MMA)
    return q0, q1, acc0, acc1, largest, weight
