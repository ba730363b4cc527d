"""One row and one kv head of decode attention on Hopper, in Gluon: queries, the newest token, tiles of keys and values.

A worker is one warp. The copy engine fills its ring of tiles; the newest token needs no cache: its norms and turns are
computed where it is attended to, and written on the way. Knows nothing of which worker has what.

Shape suffixes: D head size; a row's heads are q heads, then k heads, then v heads.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tercet.triton_kernels.decode_cells import (
    as_cached,
    as_factor,
    even_first,
    load_keys,
    load_values,
    numbers_of_half,
)
from tercet.triton_kernels.overlap import wait_for_previous
from tercet.triton_kernels.sinks import load_sinks
from tercet.triton_kernels.windows import first_seen


@gluon.constexpr_function
def group_columns(num_heads):
    """Columns of a matrix product for so many q heads of one kv head: what the matrix units take at least."""
    return 8 if num_heads <= 8 else 16


@gluon.jit
def _exp2(x):
    """2^x; what would be denormal is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def page_of(page_table_ptr, slot, tile, M, TILE: gl.constexpr, PAGE: gl.constexpr):
    return gl.load(page_table_ptr + slot.to(gl.int64) * M + gl.minimum(tile * TILE // PAGE, M - 1))


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr):
    """Shared memory for stages of tiles, each in two halves of the head: as the copy engine fills it, piece by piece,
    and as tiles."""
    PIECES: gl.constexpr = desc.block_shape[1]
    TILE: gl.constexpr = desc.block_shape[2]
    WIDTH: gl.constexpr = desc.block_shape[3]
    HALF: gl.constexpr = PIECES * WIDTH // 2
    boxes = gl.allocate_shared_memory(desc.dtype, [STAGES, 1, PIECES, TILE, WIDTH], desc.layout)
    # Pieces behind each other are laid out as a half of all of them is.
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=WIDTH * 2, element_bitwidth=16, rank=2)
    return boxes, boxes._reinterpret(desc.dtype, [STAGES * 2, TILE, HALF], LAYOUT)


@gluon.jit
def fetch(
    k_desc, v_desc, k_boxes, v_boxes, full, page, count, head, tile, known, num_pages,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Ask for one tile of keys and values.

    Of a row's last tile only what the row has is read. The copy begins so far ahead of the tile that it ends with the
    row's last token: what lies ahead of a tile is outside to the copy engine, which writes zeros in its place.
    """
    PIECES: gl.constexpr = k_desc.block_shape[1]
    TILE: gl.constexpr = k_desc.block_shape[2]
    WIDTH: gl.constexpr = k_desc.block_shape[3]
    STAGES: gl.constexpr = full.shape[0]
    stage = count % STAGES
    page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    place = (page * KV_HEADS + head) * (PAGE // TILE) + tile % (PAGE // TILE)
    first = gl.minimum(known - tile * TILE, TILE) - TILE
    bar = full.index(stage)
    mbarrier.expect(bar, 2 * PIECES * TILE * WIDTH * 2)
    tma.async_copy_global_to_shared(k_desc, [place, 0, first, 0], bar, k_boxes.index(stage))
    tma.async_copy_global_to_shared(v_desc, [place, 0, first, 0], bar, v_boxes.index(stage))


@gluon.jit
def _load_halves(ptr, columns, HALF: gl.constexpr):
    return gl.load(ptr + columns).to(gl.float32), gl.load(ptr + HALF + columns).to(gl.float32)


@gluon.jit
def _store_halves(ptr, columns, x, y, mask, HALF: gl.constexpr):
    gl.store(ptr + columns, x.to(ptr.dtype.element_ty), mask=mask)
    gl.store(ptr + HALF + columns, y.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _turn(x, y, squares, norm0, norm1, cos, sin, eps, HALF: gl.constexpr, NORM: gl.constexpr):
    """Heads in two halves, normed and turned by their position; fp32, to be rounded once."""
    if NORM:
        inverse = gl.rsqrt(squares / (2 * HALF) + eps)
        x *= inverse * norm0
        y *= inverse * norm1
    return x * cos - y * sin, y * cos + x * sin


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
        own = _exp2(newest - finite)
        weight = first[:, None] * (own + _exp2(sinks - finite))[None, :]
        acc0 *= own[None, :]
        acc1 *= own[None, :]
    return acc0, acc1, largest, weight


@gluon.jit
def begin_pair(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, page_table_ptr, sinks_ptr, k_ptr, v_ptr, row, slot, known,
    head, is_last, eps, unit, M, P, num_pages, H: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, TILE: gl.constexpr, NORM: gl.constexpr, PDL: gl.constexpr,
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
    cos, sin = _load_halves(cos_sin_ptr + gl.minimum(turn, P - 1).to(gl.int64) * D, columns, HALF)
    q_norm0, q_norm1 = _load_halves(q_norm_ptr, columns, HALF)
    k_norm0, k_norm1 = _load_halves(k_norm_ptr, columns, HALF)
    own_page = page_of(page_table_ptr, slot, known // TILE, M, TILE, PAGE).to(gl.int64)
    sinks = None
    if sinks_ptr is not None:
        group = gl.arange(0, GROUP, gl.SliceLayout(0, MMA))
        sinks = load_sinks(sinks_ptr + head * G, group, group < G)
    # Up to here nothing was read that the kernel ahead writes.
    wait_for_previous(PDL)
    heads_ptr = qkv_ptr + row * ((H + 2 * KV_HEADS) * D)
    q_ptrs = heads_ptr + (head * G + heads)[:, None] * D + columns[None, :]
    mine = (heads < G)[:, None] & (columns < HALF)[None, :]
    x0 = gl.load(q_ptrs, mask=mine, other=0.0).to(gl.float32)
    x1 = gl.load(q_ptrs + HALF, mask=mine, other=0.0).to(gl.float32)
    k_ptrs = heads_ptr + (H + head) * D + columns
    wanted = is_last & (columns < HALF)
    k0 = gl.load(k_ptrs, mask=wanted, other=0.0).to(gl.float32)
    k1 = gl.load(k_ptrs + HALF, mask=wanted, other=0.0).to(gl.float32)
    v0 = gl.load(k_ptrs + KV_HEADS * D, mask=wanted, other=0.0)
    v1 = gl.load(k_ptrs + KV_HEADS * D + HALF, mask=wanted, other=0.0)
    q0, q1 = _turn(
        x0, x1, gl.sum(x0 * x0 + x1 * x1, 1)[:, None], q_norm0[None, :], q_norm1[None, :], cos[None, :],
        sin[None, :], eps, HALF, NORM,
    )  # fmt: skip
    q0 = as_factor(q0, cell)
    q1 = as_factor(q1, cell)
    k0, k1 = _turn(k0, k1, gl.sum(k0 * k0 + k1 * k1, 0), k_norm0, k_norm1, cos, sin, eps, HALF, NORM)
    key0 = as_cached(k0, cell)
    key1 = as_cached(k1, cell)
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


@gluon.jit
def _transpose_blocks(p, MMA: gl.constexpr):
    """Weights, [TILE, GROUP]: from where a product leaves its sums to where it has its right side, blocks of 8x8."""
    TILE: gl.constexpr = p.shape[0]
    GROUP: gl.constexpr = p.shape[1]
    turned = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], p.dtype, True, 2)
    blocks = gl.permute(gl.reshape(turned, (TILE // 8, 8, GROUP // 8, 8)), (0, 3, 2, 1))
    return gl.convert_layout(gl.reshape(blocks, (TILE, GROUP)), gl.DotOperandLayout(1, MMA, 2), True)


@gluon.jit
def attend_tile(k_ring, v_ring, stage, q0, q1, acc0, acc1, largest, weight, unit, start, known, WINDOW: gl.constexpr):
    """One tile in the softmax so far. A row's last tile ends with its last token (see `fetch`).

    Keys and values are the tall side of the products, a group's heads the narrow one, of 8 columns. `weight` is summed
    over tokens at the end alone.
    """
    MMA: gl.constexpr = acc0.type.layout
    TILE: gl.constexpr = k_ring.shape[1]
    GROUP: gl.constexpr = acc0.shape[1]
    TALL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    zeros = gl.zeros((TILE, GROUP), gl.float32, MMA)
    # Two sums, so that half as many products wait for each other.
    s = mma_v2(load_keys(k_ring.index(stage * 2), TALL), q0, zeros)
    s += mma_v2(load_keys(k_ring.index(stage * 2 + 1), TALL), q1, zeros)
    places = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    hidden = start + TILE - known
    if WINDOW > 0:
        # Also what is ahead of the window, which lies behind what the copy put ahead.
        hidden = gl.maximum(hidden, 0) + gl.maximum(first_seen(known, WINDOW) - start, 0)
    s = gl.where((places >= hidden)[:, None], s, float("-inf"))
    new = gl.maximum(largest, gl.max(s, 0) * unit)
    shrink = _exp2(largest - new)
    weights = _exp2(s * unit - new[None, :])
    weight = weight * shrink[None, :] + weights
    p = _transpose_blocks(weights.to(q0.dtype), MMA)
    acc0 = mma_v2(load_values(v_ring.index(stage * 2), TALL), p, acc0 * shrink[None, :])
    acc1 = mma_v2(load_values(v_ring.index(stage * 2 + 1), TALL), p, acc1 * shrink[None, :])
    return acc0, acc1, new, weight


@gluon.jit
def _store_heads(out_ptr, places, y0, y1, D: gl.constexpr, G: gl.constexpr, PAIRED: gl.constexpr):
    """The two halves of each head of the group, in rows of D numbers."""
    MMA: gl.constexpr = y0.type.layout
    half = numbers_of_half(D // 2, gl.SliceLayout(1, MMA), PAIRED)
    group = gl.arange(0, y0.shape[1], gl.SliceLayout(0, MMA))
    valid = (half < D // 2)[:, None] & (group < G)[None, :]
    ptrs = out_ptr + places[None, :] * D + half[:, None]
    gl.store(ptrs, y0, mask=valid)
    gl.store(ptrs + D // 2, y1, mask=valid)


@gluon.jit
def store_whole(out_ptr, first, acc0, acc1, weight, D: gl.constexpr, G: gl.constexpr, PAIRED: gl.constexpr):
    """A pair that nobody else has a part of. `first`: the place of its first head."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    places = first + gl.arange(0, acc0.shape[1], gl.SliceLayout(0, acc0.type.layout))
    whole = gl.sum(weight, 0)[None, :]
    _store_heads(out_ptr, places, (acc0 / whole).to(dtype), (acc1 / whole).to(dtype), D, G, PAIRED)


@gluon.jit
def store_part(
    part_ptr, stats_ptr, first, acc0, acc1, largest, weight, D: gl.constexpr, G: gl.constexpr, PAIRED: gl.constexpr
):
    """What is to be merged with other parts."""
    group = gl.arange(0, acc0.shape[1], gl.SliceLayout(0, acc0.type.layout))
    places = first + group
    _store_heads(part_ptr, places, acc0, acc1, D, G, PAIRED)
    gl.store(stats_ptr + places * 2, largest, mask=group < G)
    gl.store(stats_ptr + places * 2 + 1, gl.sum(weight, 0), mask=group < G)
