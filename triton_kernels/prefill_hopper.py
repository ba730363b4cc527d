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
from tercet.triton_kernels.prefill_load import PIECE, RECORD, ROWS, keys_of, load_tiles, num_turns, pair_of, start_next
from tercet.triton_kernels.prefill_rings import make_rings
from tercet.triton_kernels.prefill_softmax import hide, weigh
from tercet.triton_kernels.prefill_store import clear_padding, store_part, store_rows


@gluon.jit
def _begin(q, k_ring, k_full, k_free, unit, query, last_seen, count, dtype: gl.constexpr, WEIGHTS: gl.constexpr):
    """Scores of a tile's first keys, by themselves, and their softmax."""
    STAGES: gl.constexpr = k_ring.shape[0]
    TILE: gl.constexpr = k_ring.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    zeros = gl.zeros((ROWS, TILE), gl.float32, SCORES)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    if query + 1 < TILE:
        s = hide(s, query, 0, last_seen)
    nothing = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    weights, largest, _ = weigh(s, nothing, unit, False)
    return gl.convert_layout(weights.to(dtype), WEIGHTS), largest, gl.sum(weights, 1)


@gluon.jit
def _advance(
    q, k_ring, v_ring, k_full, k_free, v_full, v_free, turns, acc, p, largest, weight, unit, query, last_seen, start,
    count, move, WHICH: gl.constexpr, HIDE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Scores of the first keys of tile `count` of the ring and values of the tile before it, together; then the softmax
    of the scores."""
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
        s = hide(s, query, start, last_seen)
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
def _clean(v_parts, cleaned, stage, start, known, turn, D: gl.constexpr, WHICH: gl.constexpr, GROUPS: gl.constexpr):
    """Cells beyond the sequence's end may hold anything, NaN too: groups share the pieces of a tile to clear."""
    TILE: gl.constexpr = keys_of(D)
    COLUMNS: gl.constexpr = D // PIECE
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
def _add_last(
    p, v_ring, v_parts, v_free, cleaned, acc, stage, start, known, unclean, num_cleaned,
    D: gl.constexpr, WHICH: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Values of the last keys, which nothing follows."""
    if unclean:
        _clean(v_parts, cleaned, stage, start, known, num_cleaned, D, WHICH, GROUPS)
    acc = warpgroup_mma(p, v_ring.index(stage).slice(0, p.shape[1]), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_free.index(stage))
    return acc


@gluon.jit
def attend(
    rings, tiles_ptr, ends_ptr, outs, unit, num_pairs,
    H: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr, HEADS: gl.constexpr, WHICH: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp group: its share of each tile's queries, or its head, from the first scores to the store."""
    q_ring, k_ring, v_ring, v_parts, q_full, q_free, k_full, k_free, v_full, v_free, cleaned, turns = rings
    out_ptr, partial_ptr, stats_ptr = outs
    STAGES: gl.constexpr = k_ring.shape[0]
    AHEAD: gl.constexpr = q_full.shape[0]
    GROUPS: gl.constexpr = turns.shape[0]
    TILE: gl.constexpr = keys_of(D)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OFFSET: gl.constexpr = WHICH * ROWS if HEADS == 1 else 0
    HEAD: gl.constexpr = WHICH if HEADS == 2 else 0
    BLOCK_Q: gl.constexpr = GROUPS // HEADS * ROWS
    HALVES: gl.constexpr = TILE > PIECE and ends_ptr is None
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
        seen = gl.load(record_ptr + 4)
        known = gl.load(record_ptr + 5)
        # Parts have so many tiles that only the first of all, or a last one, has keys that some query does not see.
        begin = 0
        if PARTS:
            begin = gl.load(record_ptr + 6)
        last = gl.cdiv(seen, TILE)
        end = (last - 1) * TILE
        # Of its last tile a group may see none of the second piece, which is left out then.
        half = ((last > 1) & (query + ROWS <= end + PIECE)).to(gl.int32) if HALVES else 0
        # In tiles that every query of the group sees whole nothing is hidden.
        whole = gl.minimum(gl.maximum((query + 1) // TILE, 1), last)

        last_seen = None
        if ends_ptr is not None:  # queries of images see those behind them
            rows = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            ends = gl.load(ends_ptr + first + rows, mask=rows < num_queries, other=0)
            last_seen = gl.maximum(query + rows, ends - 1)

        place = turn % AHEAD
        queries = q_ring.index(GROUPS * place + WHICH)
        mbarrier.wait(q_full.index(place), turn // AHEAD & 1)
        q = queries
        if q_ring.dtype != k_ring.dtype:
            q = turn_queries(queries)
        p, largest, weight = _begin(q, k_ring, k_full, k_free, unit, query, last_seen, count, v_ring.dtype, WEIGHTS)
        acc = gl.zeros((ROWS, D), gl.float32, SUMS)
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        for tile in range(begin + 1, whole):
            count += 1
            acc, p, largest, weight = _advance(
                q, k_ring, v_ring, k_full, k_free, v_full, v_free, turns, acc, p, largest, weight, unit, query,
                last_seen, tile * TILE, count, move, WHICH, False, TILE,
            )  # fmt: skip
            move += 1
        for tile in range(whole, last - half):
            count += 1
            acc, p, largest, weight = _advance(
                q, k_ring, v_ring, k_full, k_free, v_full, v_free, turns, acc, p, largest, weight, unit, query,
                last_seen, tile * TILE, count, move, WHICH, True, TILE,
            )  # fmt: skip
            move += 1
        unclean = known < end + TILE
        if half:
            count += 1
            acc, few, largest_of_few, weight_of_few = _advance(
                q, k_ring, v_ring, k_full, k_free, v_full, v_free, turns, acc, p, largest, weight, unit, query,
                last_seen, end, count, move, WHICH, True, PIECE,
            )  # fmt: skip
            move += 1
            acc = _add_last(
                few, v_ring, v_parts, v_free, cleaned, acc, count % STAGES, end, known, unclean, num_cleaned, D, WHICH,
                GROUPS,
            )  # fmt: skip
            largest = gl.convert_layout(largest_of_few, largest.type.layout)
            weight = gl.convert_layout(weight_of_few, weight.type.layout)
        else:
            acc = _add_last(
                p, v_ring, v_parts, v_free, cleaned, acc, count % STAGES, end, known, unclean, num_cleaned, D, WHICH,
                GROUPS,
            )  # fmt: skip
        num_cleaned += unclean.to(gl.int32)
        count += 1

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


@gluon.jit
def begin_step(
    tiles_ptr, out_ptr, N, H: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Wait for the kernel ahead, and leave zeros for padding; returns how many pairs of a tile and `HEADS` heads."""
    start_next(PDL)
    num_tiles = gl.load(tiles_ptr + N * RECORD)
    padded = gl.load(tiles_ptr + N * RECORD + 1)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    clear_padding(tiles_ptr, out_ptr, num_tiles * H, padded * H, H, D, BLOCK_Q, NUM_PROGRAMS, dtype)
    return num_tiles * (H // HEADS)


@gluon.jit(do_not_specialize=["N", "M", "num_pages"], do_not_specialize_on_alignment=["N", "M", "num_pages"])
def hopper_prefill_kernel(
    q_desc, k_desc, v_desc, tiles_ptr, page_table_ptr, ends_ptr, out_ptr, partial_ptr, stats_ptr, scale, N, M,
    num_pages,
    H: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr,
    HEADS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor, each with its share of the pairs of a tile and `HEADS` heads.

    `ends_ptr`: where images end, or None; `PARTS`: whether tiles are cut by keys too; `GROUPS`: warp groups that
    compute, one or two; `AHEAD`: for how many tiles' queries there is room.
    """
    rings, k_parts = make_rings(q_desc, k_desc.dtype, D, STAGES, GROUPS, AHEAD)
    q_ring, _, _, v_parts, q_full, q_free, k_full, k_free, v_full, v_free, _, _ = rings
    num_pairs = begin_step(tiles_ptr, out_ptr, N, H, D, HEADS, GROUPS // HEADS * ROWS, NUM_PROGRAMS, PDL)
    unit = scale * 1.4426950408889634
    copies = q_desc, k_desc, v_desc, q_ring, k_parts, v_parts, q_full, q_free, k_full, k_free, v_full, v_free
    work = tiles_ptr, page_table_ptr, num_pairs, M, num_pages
    outs = out_ptr, partial_ptr, stats_ptr
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (rings, tiles_ptr, ends_ptr, outs, unit, num_pairs, H, D, PARTS, HEADS, zero, NUM_PROGRAMS)),
                (attend, (rings, tiles_ptr, ends_ptr, outs, unit, num_pairs, H, D, PARTS, HEADS, one, NUM_PROGRAMS)),
                (load_tiles, (copies, work, H, KV_HEADS, D, PAGE, PARTS, HEADS, NUM_PROGRAMS)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (rings, tiles_ptr, ends_ptr, outs, unit, num_pairs, H, D, PARTS, HEADS, zero, NUM_PROGRAMS)),
                (load_tiles, (copies, work, H, KV_HEADS, D, PAGE, PARTS, HEADS, NUM_PROGRAMS)),
            ],
            [1],
            [40],
        )  # fmt: skip
