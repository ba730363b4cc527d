"""Decode attention on Hopper with a row's bits its own: as `decode_hopper.py`, by splits at fixed positions, in Gluon.

A worker is one warp, with every NUM_WORKERS-th pair of a split and a kv head. The copy engine fills its ring of tiles,
over the ends of pairs too, and begins before the kernel ahead has ended.

Shape suffixes: D head size; a row's heads are q heads, then k heads, then v heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tercet.triton_kernels.decode_newest import begin_pair, page_of
from tercet.triton_kernels.decode_pair import attend_tile, fetch, make_ring, store_part, store_whole
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.windows import first_tile

_SPLIT_WORDS = gl.constexpr(4)  # as in fixed_splits.py


@gluon.jit
def _begin_of(end, first, SPLIT: gl.constexpr, WINDOW: gl.constexpr):
    """The first tile that is seen of the split that ends with the tile before `end`."""
    begin = (end - 1) // SPLIT * SPLIT
    if WINDOW > 0:
        begin = gl.maximum(begin, first)
    return begin


@gluon.jit
def _next_tile(
    splits_ptr, pair, total, slot, known, tile, end, KV_HEADS: gl.constexpr, TILE: gl.constexpr, SPLIT: gl.constexpr,
    STEP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The worker's tile behind a tile: of the same pair, or the first of its next, if there is one."""
    tile += 1
    if tile == end:
        pair += STEP
        if pair < total:
            record_ptr = splits_ptr + pair // KV_HEADS * _SPLIT_WORDS
            slot = gl.load(record_ptr + 1)
            known = gl.load(record_ptr + 2)
            end = gl.load(record_ptr + 3)
            tile = _begin_of(end, first_tile(known, TILE, WINDOW), SPLIT, WINDOW)
    return pair, slot, known, tile, end


@gluon.jit(do_not_specialize=["M", "P", "num_pages"], do_not_specialize_on_alignment=["M", "P", "num_pages"])
def fixed_decode_kernel(
    k_desc, v_desc, k_ptr, v_ptr, qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, page_table_ptr, sinks_ptr,
    splits_ptr, num_splits_ptr, starts_ptr, part_ptr, stats_ptr, out_ptr, eps, scale, M, P, num_pages,
    H: gl.constexpr, KV_HEADS: gl.constexpr, ROW: gl.constexpr, D: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, NUM_WORKERS: gl.constexpr, WINDOW: gl.constexpr, NORM: gl.constexpr,
    NORM_VALUES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_WORKERS,), one warp each."""
    TILE: gl.constexpr = k_desc.block_shape[2]
    G: gl.constexpr = H // KV_HEADS
    PAIRED: gl.constexpr = k_desc.dtype == gl.int16
    k_boxes, k_ring = make_ring(k_desc, STAGES)
    v_boxes, v_ring = make_ring(v_desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for barrier in gl.static_range(STAGES):
        mbarrier.init(full.index(barrier), count=1)

    let_next_start(PDL)
    worker = gl.program_id(0)
    total = gl.load(num_splits_ptr) * KV_HEADS
    # The worker's tiles as the copy engine sees them: some ahead. The next page is looked up a tile ahead of that.
    next_pair = worker
    next_slot = worker
    next_known = worker
    next_end = worker
    next_tile = worker
    next_page = worker
    if worker < total:
        record_ptr = splits_ptr + worker // KV_HEADS * _SPLIT_WORDS
        next_slot = gl.load(record_ptr + 1)
        next_known = gl.load(record_ptr + 2)
        next_end = gl.load(record_ptr + 3)
        next_tile = _begin_of(next_end, first_tile(next_known, TILE, WINDOW), SPLIT, WINDOW)
        next_page = page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)
    for ahead in range(STAGES):
        if next_pair < total:
            next_head = next_pair % KV_HEADS
            fetch(
                k_desc, v_desc, k_boxes, v_boxes, full, next_page, ahead, next_head, next_tile, next_known, num_pages,
                KV_HEADS, PAGE,
            )  # fmt: skip
            next_pair, next_slot, next_known, next_tile, next_end = _next_tile(
                splits_ptr, next_pair, total, next_slot, next_known, next_tile, next_end, KV_HEADS, TILE, SPLIT,
                NUM_WORKERS, WINDOW,
            )  # fmt: skip
            if next_pair < total:
                next_page = page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)

    unit = scale * 1.4426950408889634
    count = 0
    for pair in range(worker, total, NUM_WORKERS):
        record_ptr = splits_ptr + pair // KV_HEADS * _SPLIT_WORDS
        head = pair % KV_HEADS
        row = gl.load(record_ptr).to(gl.int64)
        slot = gl.load(record_ptr + 1)
        known = gl.load(record_ptr + 2)
        end = gl.load(record_ptr + 3)
        first = first_tile(known, TILE, WINDOW)
        begin = _begin_of(end, first, SPLIT, WINDOW)
        # A row without a token in the cache has a tile all the same.
        is_last = end * TILE >= known
        q0, q1, acc0, acc1, largest, weight = begin_pair(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, page_table_ptr, sinks_ptr, k_ptr, v_ptr, row,
            slot, known, head, is_last, eps, unit, M, P, num_pages, H, KV_HEADS, ROW, D, R, PAGE, TILE, NORM,
            NORM_VALUES, PDL,
        )  # fmt: skip
        for at in range(begin, end):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            acc0, acc1, largest, weight = attend_tile(
                k_ring, v_ring, stage, q0, q1, acc0, acc1, largest, weight, unit, at * TILE, known, WINDOW
            )
            if next_pair < total:
                next_head = next_pair % KV_HEADS
                fetch(
                    k_desc, v_desc, k_boxes, v_boxes, full, next_page, count + STAGES, next_head, next_tile,
                    next_known, num_pages, KV_HEADS, PAGE,
                )  # fmt: skip
                next_pair, next_slot, next_known, next_tile, next_end = _next_tile(
                    splits_ptr, next_pair, total, next_slot, next_known, next_tile, next_end, KV_HEADS, TILE,
                    SPLIT, NUM_WORKERS, WINDOW,
                )  # fmt: skip
                if next_pair < total:
                    next_page = page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)
            count += 1
        if (begin == first) & is_last:
            store_whole(out_ptr, row * H + head * G, acc0, acc1, weight, D, G, PAIRED)
        else:
            part = gl.load(starts_ptr + row) + begin // SPLIT - first // SPLIT
            place = part.to(gl.int64) * H + head * G
            store_part(part_ptr, stats_ptr, place, acc0, acc1, largest, weight, D, G, PAIRED)
    # Who has nothing to do makes room; but not all: the next kernel would find this one at its end too soon.
    if worker == 0:
        wait_for_previous(PDL)
