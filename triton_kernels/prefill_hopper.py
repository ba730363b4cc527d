"""Prefill attention on Hopper: a warp that only loads, and one or two warp groups that only compute, in Gluon.

Each group owns 64 of a tile's queries, or all 64 of one of two heads, and runs its softmax while the matrix units work
for it on the tile before, and for the other group. One group is for tiles so few that they leave multiprocessors
without any. The warp is in `prefill_load.py`, what is written in `prefill_store.py`.

Shape suffixes: T prefill tokens, H q heads, D head size, M pages of a slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tercet.triton_kernels.prefill_cells import turn_queries
from tercet.triton_kernels.prefill_load import PIECE, RECORD, ROWS, first_keys, load_tiles, num_turns, pair_of
from tercet.triton_kernels.prefill_rings import make_rings
from tercet.triton_kernels.prefill_softmax import hide, weigh
from tercet.triton_kernels.prefill_store import begin_step, store_part, store_rows


@gluon.jit
def _keys_seen(record_ptr, query, TILE: gl.constexpr, PARTS: gl.constexpr, WINDOW: gl.constexpr, HALVES: gl.constexpr):
    """Of a group's queries, in tiles of keys: the first; from where on and up to where every query sees all; the end;
    and whether none sees the second piece of the last tile, which is left out then."""
    # Parts have so many tiles that only the first of all, or a last one, has keys that some query does not see.
    begin = first_keys(record_ptr, TILE, PARTS, WINDOW)
    last = gl.cdiv(gl.load(record_ptr + 4), TILE)
    half = ((last > begin + 1) & (query + ROWS <= (last - 1) * TILE + PIECE)).to(gl.int32) if HALVES else 0
    first_whole = begin + 1
    if WINDOW > 0:
        first_whole = gl.minimum(gl.maximum(gl.cdiv(query + ROWS - WINDOW, TILE), first_whole), last - half)
    whole = gl.minimum(gl.maximum((query + 1) // TILE, first_whole), last - half)
    return begin, first_whole, whole, last, half


@gluon.jit
def _begin(rings, q, unit, sink, query, last_seen, start, count, WEIGHTS: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of a tile's first keys, by themselves, and their softmax. `sink`: one score more, or None."""
    k_ring, v_ring, k_full, k_free = rings[1], rings[2], rings[6], rings[7]
    STAGES: gl.constexpr = k_ring.shape[0]
    TILE: gl.constexpr = k_ring.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    zeros = gl.zeros((ROWS, TILE), gl.float32, SCORES)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    if WINDOW > 0:
        s = hide(s, query, start, last_seen, WINDOW)
    elif query + 1 < TILE:
        s = hide(s, query, 0, last_seen, WINDOW)
    nothing = gl.full((ROWS,), float("-inf") if sink is None else sink, gl.float32, gl.SliceLayout(1, SCORES))
    weights, largest, shrink = weigh(s, nothing, unit, WINDOW > 0)
    weight = gl.sum(weights, 1)
    if sink is not None:
        weight += shrink
    return gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS), largest, weight


@gluon.jit
def _advance(
    rings, q, sums, unit, query, last_seen, start, count, move,
    WHICH: gl.constexpr, HIDE: gl.constexpr, WINDOW: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Scores of the first keys of tile `count` of the ring and values of the tile before it, together; then the softmax
    of the scores."""
    _, k_ring, v_ring, _, _, _, k_full, k_free, v_full, v_free, _, turns = rings
    acc, p, largest, weight = sums
    STAGES: gl.constexpr = k_ring.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    stage = count % STAGES
    previous = (count - 1) % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    # Two groups take turns: one multiplies while the other is at its softmax. Of one, each turn is its own.
    mbarrier.wait(turns.index(WHICH), move & 1)
    zeros = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    k = k_ring.index(stage).slice(0, KEYS)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(p, v_ring.index(previous), acc, is_async=True)
    mbarrier.arrive(turns.index((WHICH + 1) % turns.shape[0]))
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    if HIDE:
        s = hide(s, query, start, last_seen, WINDOW)
    weights, new, shrink = weigh(s, gl.convert_layout(largest, gl.SliceLayout(1, SCORES)), unit, HIDE)
    weight = gl.convert_layout(weight, gl.SliceLayout(1, SCORES)) * shrink + gl.sum(weights, 1)
    # A branch between them keeps the compiler from moving the softmax behind the products' end.
    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_free.index(previous))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(weights.to(v_ring.dtype), p.type.layout)
    return acc, p, new, weight


@gluon.jit
def _advance_over(
    rings, q, sums, unit, query, last_seen, first, end, count, move,
    WHICH: gl.constexpr, HIDE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Tiles of keys from `first` on, up to the one ahead of `end`."""
    TILE: gl.constexpr = rings[1].shape[1]
    acc, p, largest, weight = sums
    for tile in range(first, end):
        count += 1
        acc, p, largest, weight = _advance(
            rings, q, (acc, p, largest, weight), unit, query, last_seen, tile * TILE, count, move, WHICH, HIDE, WINDOW,
            TILE,
        )  # fmt: skip
        move += 1
    return (acc, p, largest, weight), count, move


@gluon.jit
def _clean(rings, stage, start, known, turn, WHICH: gl.constexpr):
    """Cells beyond the sequence's end may hold anything, NaN too: groups share the pieces of a tile to clear."""
    v_ring, v_parts, cleaned, turns = rings[2], rings[3], rings[10], rings[11]
    TILE: gl.constexpr = v_ring.shape[1]
    COLUMNS: gl.constexpr = v_ring.shape[2] // PIECE
    GROUPS: gl.constexpr = turns.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for piece in gl.static_range(WHICH, TILE // PIECE, GROUPS):
        positions = start + piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT))
        for column in gl.static_range(COLUMNS):
            part = v_parts.index((stage * COLUMNS + column) * (TILE // PIECE) + piece)
            values = part.load(LAYOUT)
            part.store(gl.where((positions < known)[:, None], values, 0.0).to(v_parts.dtype))
    fence_async_shared()
    mbarrier.arrive(cleaned)
    mbarrier.wait(cleaned, turn & 1)


@gluon.jit
def _add_last(rings, p, acc, start, known, count, num_cleaned, WHICH: gl.constexpr):
    """Values of the last keys, which nothing follows."""
    v_ring, v_free = rings[2], rings[9]
    stage = count % v_ring.shape[0]
    if known < start + v_ring.shape[1]:
        _clean(rings, stage, start, known, num_cleaned, WHICH)
    acc = warpgroup_mma(p, v_ring.index(stage).slice(0, p.shape[1]), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_free.index(stage))
    return acc


@gluon.jit
def _attend_keys(
    rings, q, record_ptr, unit, sink, query, last_seen, count, move, num_cleaned,
    PARTS: gl.constexpr, WINDOW: gl.constexpr, HALVES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """A group's queries and all the keys that its tile has: sums, largest scores, weights; and where it is then."""
    v_ring, v_full = rings[2], rings[8]
    STAGES: gl.constexpr = v_ring.shape[0]
    TILE: gl.constexpr = v_ring.shape[1]
    D: gl.constexpr = v_ring.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    known = gl.load(record_ptr + 5)
    begin, first_whole, whole, last, half = _keys_seen(record_ptr, query, TILE, PARTS, WINDOW, HALVES)
    end = (last - 1) * TILE
    p, largest, weight = _begin(rings, q, unit, sink, query, last_seen, begin * TILE, count, WEIGHTS, WINDOW)
    acc = gl.zeros((ROWS, D), gl.float32, SUMS)
    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
    sums = acc, p, largest, weight
    if WINDOW > 0:
        sums, count, move = _advance_over(
            rings, q, sums, unit, query, last_seen, begin + 1, first_whole, count, move, WHICH, True, WINDOW
        )
    sums, count, move = _advance_over(
        rings, q, sums, unit, query, last_seen, first_whole, whole, count, move, WHICH, False, WINDOW
    )
    sums, count, move = _advance_over(
        rings, q, sums, unit, query, last_seen, whole, last - half, count, move, WHICH, True, WINDOW
    )
    acc, p, largest, weight = sums
    if half:
        count += 1
        acc, few, largest_of_few, weight_of_few = _advance(
            rings, q, (acc, p, largest, weight), unit, query, last_seen, end, count, move, WHICH, True, WINDOW, PIECE
        )
        move += 1
        acc = _add_last(rings, few, acc, end, known, count, num_cleaned, WHICH)
        largest = gl.convert_layout(largest_of_few, largest.type.layout)
        weight = gl.convert_layout(weight_of_few, weight.type.layout)
    else:
        acc = _add_last(rings, p, acc, end, known, count, num_cleaned, WHICH)
    return acc, largest, weight, count + 1, move, num_cleaned + (known < end + TILE).to(gl.int32)


@gluon.jit
def attend(
    rings, given, outs, unit, num_pairs,
    H: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr,
    WHICH: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp group: its share of each tile's queries, or its head, from the first scores to the store."""
    q_ring, k_ring, q_full, q_free, turns = rings[0], rings[1], rings[4], rings[5], rings[11]
    tiles_ptr, ends_ptr, sinks_ptr = given
    out_ptr, partial_ptr, stats_ptr = outs
    AHEAD: gl.constexpr = q_full.shape[0]
    GROUPS: gl.constexpr = turns.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_ring.shape[1], 16])
    OFFSET: gl.constexpr = WHICH * ROWS if HEADS == 1 else 0
    HEAD: gl.constexpr = WHICH if HEADS == 2 else 0
    BLOCK_Q: gl.constexpr = GROUPS // HEADS * ROWS
    HALVES: gl.constexpr = k_ring.shape[1] > PIECE and ends_ptr is None
    count = 0
    move = 0
    num_cleaned = 0
    for turn in range(num_turns(num_pairs, NUM_PROGRAMS)):
        pair = pair_of(turn, NUM_PROGRAMS)
        record = pair // (H // HEADS)
        head = pair % (H // HEADS) * HEADS + HEAD
        record_ptr = tiles_ptr + record * RECORD
        first = gl.load(record_ptr) + OFFSET
        num_queries = gl.load(record_ptr + 1) - OFFSET
        query = gl.load(record_ptr + 2) + OFFSET
        last_seen = None
        if ends_ptr is not None:  # queries of images see those behind them
            rows = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            ends = gl.load(ends_ptr + first + rows, mask=rows < num_queries, other=0)
            last_seen = gl.maximum(query + rows, ends - 1)
        sink = None
        if sinks_ptr is not None:  # of a tile's parts the first counts it
            counts = gl.load(record_ptr + 6) == 0 if PARTS else True
            sink = gl.load(sinks_ptr + head, mask=counts, other=float("-inf")).to(gl.float32) * 1.4426950408889634

        place = turn % AHEAD
        queries = q_ring.index(GROUPS * place + WHICH)
        mbarrier.wait(q_full.index(place), turn // AHEAD & 1)
        q = queries
        if q_ring.dtype != k_ring.dtype:
            q = turn_queries(queries)
        acc, largest, weight, count, move, num_cleaned = _attend_keys(
            rings, q, record_ptr, unit, sink, query, last_seen, count, move, num_cleaned, PARTS, WINDOW, HALVES, WHICH
        )
        # Of the queries nothing is needed any more.
        if PARTS:  # one branch for both would be shorter: Triton 3.6 cannot compile the store of parts that never are
            if gl.load(record_ptr + 7) > 1:
                store_part(acc, largest, weight, partial_ptr, stats_ptr, record * BLOCK_Q + OFFSET, head, H, D)
            else:
                store_rows(acc, weight, queries, out_ptr, first, num_queries, head, H, D)
        else:
            store_rows(acc, weight, queries, out_ptr, first, num_queries, head, H, D)
        fence_async_shared()
        mbarrier.arrive(q_free.index(place))


@gluon.jit(do_not_specialize=["N", "M", "num_pages"], do_not_specialize_on_alignment=["N", "M", "num_pages"])
def hopper_prefill_kernel(
    q_desc, k_desc, v_desc, tiles_ptr, page_table_ptr, ends_ptr, sinks_ptr, out_ptr, partial_ptr, stats_ptr, scale, N,
    M, num_pages,
    H: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr,
    WINDOW: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor, each with its share of the pairs of a tile and `HEADS` heads.

    `ends_ptr`: where images end, or None; `sinks_ptr`: one score more of each q head, or None; `PARTS`: whether tiles
    are cut by keys too; `GROUPS`: warp groups that compute, one or two; `AHEAD`: for how many tiles' queries there is
    room.
    """
    rings, k_parts = make_rings(q_desc, k_desc.dtype, D, STAGES, GROUPS, AHEAD)
    q_ring, _, _, v_parts, q_full, q_free, k_full, k_free, v_full, v_free, _, _ = rings
    num_pairs = begin_step(tiles_ptr, out_ptr, N, H, D, HEADS, GROUPS // HEADS * ROWS, NUM_PROGRAMS, PDL)
    unit = scale * 1.4426950408889634
    copies = q_desc, k_desc, v_desc, q_ring, k_parts, v_parts, q_full, q_free, k_full, k_free, v_full, v_free
    work = tiles_ptr, page_table_ptr, num_pairs, M, num_pages
    outs = out_ptr, partial_ptr, stats_ptr
    given = tiles_ptr, ends_ptr, sinks_ptr
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (rings, given, outs, unit, num_pairs, H, D, PARTS, WINDOW, HEADS, zero, NUM_PROGRAMS)),
                (attend, (rings, given, outs, unit, num_pairs, H, D, PARTS, WINDOW, HEADS, one, NUM_PROGRAMS)),
                (load_tiles, (copies, work, H, KV_HEADS, D, PAGE, PARTS, WINDOW, HEADS, NUM_PROGRAMS)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (rings, given, outs, unit, num_pairs, H, D, PARTS, WINDOW, HEADS, zero, NUM_PROGRAMS)),
                (load_tiles, (copies, work, H, KV_HEADS, D, PAGE, PARTS, WINDOW, HEADS, NUM_PROGRAMS)),
            ],
            [1],
            [40],
        )  # fmt: skip
