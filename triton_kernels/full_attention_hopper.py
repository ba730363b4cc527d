"""Attention without a cache on Hopper: a warp that only loads, and two warp groups that only compute, in Gluon.

Each group owns 64 of a tile's queries, and runs its softmax while the matrix units work for it on the tile of keys
before, and for the other group. A head's numbers are cut into 64 and what is left, as in `full_attention.py`.

The last keys of a segment, fewer than a tile maybe, come first, in a tile that ends with them: what begins it is
hidden, being another tile's or no key of the segment at all, and behind a segment's end nothing is read.

Shape suffixes: T tokens, H heads, D head size, S segments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tercet.triton_kernels.prefill_load import start_next
from tercet.triton_kernels.prefill_softmax import weigh
from tercet.triton_kernels.prefill_store import lines_of

TILE = gl.constexpr(128)
"""Queries of a program, keys of a stage."""
WIDTH = gl.constexpr(64)
"""Numbers of a head that are multiplied at once; then the rest."""
_ROWS = gl.constexpr(64)
_STAGES = gl.constexpr(2)
_AHEAD = gl.constexpr(2)


@gluon.jit
def _num_turns(total):
    return gl.cdiv(total - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _tile_of(turn, ends_ptr, num_tiles, H: gl.constexpr):
    """Of this program's next tile: its first query, its head, and where its segment begins and ends. Tiles of a head
    are each other's neighbours."""
    index = turn * gl.num_programs(0) + gl.program_id(0)
    segment = index // num_tiles // H
    begin = gl.load(ends_ptr + segment - 1, mask=segment > 0, other=0)
    end = gl.load(ends_ptr + segment)
    return begin + index % num_tiles * TILE, index // num_tiles % H, begin, end


@gluon.jit
def _fetch(descs, rings, place, row, head, bar, REST: gl.constexpr):
    """A tile of queries, keys or values of a head: 64 numbers of each row, and what is left."""
    desc, desc_rest = descs
    ring, ring_rest = rings
    mbarrier.expect(bar, TILE * (WIDTH + REST) * 2)
    tma.async_copy_global_to_shared(desc, [row, head, 0], bar, ring.index(place))
    if REST:
        tma.async_copy_global_to_shared(desc_rest, [row, head, WIDTH], bar, ring_rest.index(place))


@gluon.jit
def _load(descs, rings, barriers, ends_ptr, num_tiles, total, H: gl.constexpr, REST: gl.constexpr):
    """The loading warp: queries of a tile, then its segment's keys and values."""
    q_rings, k_rings, v_rings = rings
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    place = 0
    count = 0
    for turn in range(_num_turns(total)):
        first, head, begin, end = _tile_of(turn, ends_ptr, num_tiles, H)
        if first < end:
            mbarrier.wait(q_free.index(place % _AHEAD), (place // _AHEAD & 1) ^ 1)
            _fetch(descs, q_rings, place % _AHEAD, first, head, q_full.index(place % _AHEAD), REST)
            place += 1
            for tile in range(gl.cdiv(end - begin, TILE)):
                row = end - TILE if tile == 0 else begin + (tile - 1) * TILE
                stage = count % _STAGES
                free = (count // _STAGES & 1) ^ 1
                mbarrier.wait(k_free.index(stage), free)
                _fetch(descs, k_rings, stage, row, H + head, k_full.index(stage), REST)
                mbarrier.wait(v_free.index(stage), free)
                _fetch(descs, v_rings, stage, row, 2 * H + head, v_full.index(stage), REST)
                count += 1


@gluon.jit
def _score(q, q_rest, k_rings, stage, REST: gl.constexpr):
    """Products of the group's queries with a tile of keys, begun."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    k_ring, k_ring_rest = k_rings
    zeros = gl.zeros((_ROWS, TILE), gl.float32, SCORES)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if REST:
        s = warpgroup_mma(q_rest, k_ring_rest.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _add(p, acc, acc_rest, v_rings, stage, REST: gl.constexpr):
    """Sums of a tile of values by their weights, begun."""
    v_ring, v_ring_rest = v_rings
    acc = warpgroup_mma(p, v_ring.index(stage), acc, is_async=True)
    if REST:
        acc_rest = warpgroup_mma(p, v_ring_rest.index(stage), acc_rest, is_async=True)
    return acc, acc_rest


@gluon.jit
def _wait(acc, acc_rest, p, REST: gl.constexpr):
    """For all products that were begun."""
    if REST:
        acc, acc_rest, p = warpgroup_mma_wait(0, deps=[acc, acc_rest, p])
    else:
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    return acc, acc_rest, p


@gluon.jit
def _shrink(acc, by):
    return acc * gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _store(acc, weight, staging, out_ptr, first, end, column, most, H: gl.constexpr, D: gl.constexpr):
    """Sums by their weights, of which no more than `most` columns are the head's: through shared memory, so that a row
    goes out sixteen bytes at a time."""
    LINES: gl.constexpr = lines_of(acc.shape[1])
    staging.store(_shrink(acc, 1.0 / weight).to(staging.dtype))
    rows = first + gl.arange(0, _ROWS, gl.SliceLayout(1, LINES))
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LINES))
    pointers = out_ptr + rows.to(gl.int64)[:, None] * (H * D) + column + columns[None, :]
    gl.store(pointers, staging.load(LINES), mask=(rows < end)[:, None] & (columns < most)[None, :])


@gluon.jit
def _attend(
    rings, barriers, turns, ends_ptr, out_ptr, unit, num_tiles, total,
    H: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warp group: its half of each tile's queries, from the first scores to the store."""
    q_rings, k_rings, v_rings = rings
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    REST_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST if REST else 16, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    q_ring, q_ring_rest = q_rings
    place = 0
    count = 0
    move = 0
    for turn in range(_num_turns(total)):
        first, head, begin, end = _tile_of(turn, ends_ptr, num_tiles, H)
        if first < end:
            at = place % _AHEAD
            mbarrier.wait(q_full.index(at), place // _AHEAD & 1)
            q = q_ring.index(at).slice(WHICH * _ROWS, _ROWS)
            q_rest = q
            if REST:
                q_rest = q_ring_rest.index(at).slice(WHICH * _ROWS, _ROWS)
            stage = count % _STAGES
            mbarrier.wait(k_full.index(stage), count // _STAGES & 1)
            s = _score(q, q_rest, k_rings, stage, REST)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(stage))
            hidden = (begin - end) & (TILE - 1)
            columns = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
            s = gl.where((columns >= hidden)[None, :], s, float("-inf"))
            largest = gl.full((_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            weights, largest, shrink = weigh(s, largest, unit, False)
            weight = gl.sum(weights, 1)
            p = gl.convert_layout(weights.to(dtype), WEIGHTS)
            acc = gl.zeros((_ROWS, WIDTH), gl.float32, SUMS)
            acc_rest = gl.zeros((_ROWS, REST if REST else 16), gl.float32, REST_SUMS)
            mbarrier.wait(v_full.index(stage), count // _STAGES & 1)
            for _ in range(1, gl.cdiv(end - begin, TILE)):
                before = count % _STAGES
                count += 1
                stage = count % _STAGES
                mbarrier.wait(k_full.index(stage), count // _STAGES & 1)
                # Groups take turns: one multiplies while the other is at its softmax.
                mbarrier.wait(turns.index(WHICH), move & 1)
                move += 1
                s = _score(q, q_rest, k_rings, stage, REST)
                acc, acc_rest = _add(p, acc, acc_rest, v_rings, before, REST)
                mbarrier.arrive(turns.index(1 - WHICH))
                s = warpgroup_mma_wait(2 if REST else 1, deps=[s])
                mbarrier.arrive(k_free.index(stage))
                weights, largest, shrink = weigh(s, largest, unit, False)
                weight = weight * shrink + gl.sum(weights, 1)
                # A branch between them keeps the compiler from moving the softmax behind the products' end.
                mbarrier.wait(v_full.index(stage), count // _STAGES & 1)
                acc, acc_rest, p = _wait(acc, acc_rest, p, REST)
                mbarrier.arrive(v_free.index(before))
                acc = _shrink(acc, shrink)
                if REST:
                    acc_rest = _shrink(acc_rest, shrink)
                p = gl.convert_layout(weights.to(dtype), WEIGHTS)
            stage = count % _STAGES
            acc, acc_rest = _add(p, acc, acc_rest, v_rings, stage, REST)
            acc, acc_rest, p = _wait(acc, acc_rest, p, REST)
            mbarrier.arrive(v_free.index(stage))
            count += 1
            # Of the queries nothing is needed any more.
            row = first + WHICH * _ROWS
            _store(acc, weight, q, out_ptr, row, end, head * D, WIDTH, H, D)
            if REST:
                _store(acc_rest, weight, q_rest, out_ptr, row, end, head * D + WIDTH, D - WIDTH, H, D)
            fence_async_shared()
            mbarrier.arrive(q_free.index(at))
            place += 1


@gluon.jit
def _make_rings(desc, desc_rest, PLACES: gl.constexpr, REST: gl.constexpr):
    """Shared memory for tiles of a head's numbers, and of what is left of them."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * WIDTH, element_bitwidth=16, rank=2)
    parts = gl.allocate_shared_memory(desc.dtype, [PLACES, TILE, 1, WIDTH], desc.layout)
    ring = parts._reinterpret(desc.dtype, [PLACES, TILE, WIDTH], LAYOUT)
    parts_rest = parts
    ring_rest = ring
    if REST:
        REST_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * REST, element_bitwidth=16, rank=2)
        parts_rest = gl.allocate_shared_memory(desc.dtype, [PLACES, TILE, 1, REST], desc_rest.layout)
        ring_rest = parts_rest._reinterpret(desc.dtype, [PLACES, TILE, REST], REST_LAYOUT)
    return (parts, parts_rest), (ring, ring_rest)


@gluon.jit
def _make_barriers(PLACES: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(barriers.index(place), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["num_tiles", "total"], do_not_specialize_on_alignment=["num_tiles", "total"])
def hopper_full_attention_kernel(
    desc, desc_rest, ends_ptr, out_ptr, unit, num_tiles, total,
    H: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): each has its share of `total` tiles, `num_tiles` for each head of each segment, the longest
    one's, if there are any. `REST`: room for what is left of a head's numbers."""
    start_next(PDL)
    q_parts, q_rings = _make_rings(desc, desc_rest, _AHEAD, REST)
    k_parts, k_rings = _make_rings(desc, desc_rest, _STAGES, REST)
    v_parts, v_rings = _make_rings(desc, desc_rest, _STAGES, REST)
    full = _make_barriers(_AHEAD, 1), _make_barriers(_STAGES, 1), _make_barriers(_STAGES, 1)
    free = _make_barriers(_AHEAD, 2), _make_barriers(_STAGES, 2), _make_barriers(_STAGES, 2)
    turns = _make_barriers(2, 1)
    mbarrier.arrive(turns.index(0))
    barriers = full[0], free[0], full[1], free[1], full[2], free[2]
    rings = q_rings, k_rings, v_rings
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_attend, (rings, barriers, turns, ends_ptr, out_ptr, unit, num_tiles, total, H, D, REST, zero)),
            (_attend, (rings, barriers, turns, ends_ptr, out_ptr, unit, num_tiles, total, H, D, REST, one)),
            (_load, ((desc, desc_rest), (q_parts, k_parts, v_parts), barriers, ends_ptr, num_tiles, total, H, REST)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
