"""Decode attention on Hopper, from a layer's q, k, v rows to attended heads, in Gluon.

A worker is one warp, with an equal stretch of the line of all tiles. The copy engine fills its ring of tiles, over the
ends of rows and heads too, and begins before the kernel ahead has ended: old keys and values are there already.

Shape suffixes: D head size; a row's heads are q heads, then k heads, then v heads. ROW is what a row has, R how many of
a head's numbers turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tercet.triton_kernels.decode_newest import begin_pair, page_of
from tercet.triton_kernels.decode_pair import attend_tile, fetch, make_ring, store_part, store_whole
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.windows import first_tile

_ROW_WORDS = gl.constexpr(4)  # as in decode_shares.py
_WORKER_WORDS = gl.constexpr(12)


@gluon.jit
def _record(rows_ptr, index):
    """A row, its slot, tokens in the cache and where tiles of a head end. There is one record more than rows."""
    record_ptr = rows_ptr + index * _ROW_WORDS
    return (
        gl.load(record_ptr).to(gl.int64), gl.load(record_ptr + 1), gl.load(record_ptr + 2), gl.load(record_ptr + 3)
    )  # fmt: skip


@gluon.jit
def _next_tile(
    rows_ptr, index, head, tile, slot, known, KV_HEADS: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr
):
    """The tile behind a tile in the line: of the same row and head, or the first of the next."""
    tile += 1
    if tile * TILE >= known:
        head += 1
        if head == KV_HEADS:
            head = 0
            index += 1
            slot = gl.load(rows_ptr + index * _ROW_WORDS + 1)
            known = gl.load(rows_ptr + index * _ROW_WORDS + 2)
        tile = first_tile(known, TILE, WINDOW)
    return index, head, tile, slot, known


@gluon.jit
def _clear_dead(lengths_ptr, out_ptr, worker, B, SIZE: gl.constexpr, NUM_WORKERS: gl.constexpr, dtype: gl.constexpr):
    """Zeros for rows of length 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    offsets = gl.arange(0, 256, LAYOUT)
    for row in range(worker, B, NUM_WORKERS):
        if gl.load(lengths_ptr + row) == 0:
            for start in range(0, SIZE, 256):
                places = out_ptr + gl.cast(row, gl.int64) * SIZE + start + offsets
                gl.store(places, gl.zeros((256,), dtype, LAYOUT), mask=start + offsets < SIZE)


@gluon.jit(do_not_specialize=["B", "M", "P", "num_pages"], do_not_specialize_on_alignment=["B", "M", "P", "num_pages"])
def hopper_decode_kernel(
    k_desc, v_desc, k_ptr, v_ptr, qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, page_table_ptr, sinks_ptr,
    rows_ptr, workers_ptr, lengths_ptr, part_ptr, stats_ptr, out_ptr, eps, scale, B, M, P, num_pages,
    H: gl.constexpr, KV_HEADS: gl.constexpr, ROW: gl.constexpr, D: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, NUM_WORKERS: gl.constexpr, WINDOW: gl.constexpr, NORM: gl.constexpr,
    NORM_VALUES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_WORKERS,), one warp each: a worker walks over its stretch of tiles."""
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
    record_ptr = workers_ptr + worker * _WORKER_WORDS
    index = gl.load(record_ptr)
    head = gl.load(record_ptr + 1)
    tile = gl.load(record_ptr + 2)
    num_pairs = gl.load(record_ptr + 3)
    num_tiles = gl.load(record_ptr + 4)
    row, slot, known, tiles = _record(rows_ptr, index)
    # The line as the copy engine sees it: some tiles ahead. Its next page is looked up a tile ahead of that.
    next_index = index
    next_head = head
    next_tile = tile
    next_slot = slot
    next_known = known
    next_page = index
    if num_tiles > 0:
        next_page = page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)
    fetched = gl.minimum(num_tiles, STAGES)
    for ahead in range(fetched):
        fetch(
            k_desc, v_desc, k_boxes, v_boxes, full, next_page, ahead, next_head, next_tile, next_known, num_pages,
            KV_HEADS, PAGE,
        )  # fmt: skip
        next_index, next_head, next_tile, next_slot, next_known = _next_tile(
            rows_ptr, next_index, next_head, next_tile, next_slot, next_known, KV_HEADS, TILE, WINDOW
        )
        if ahead + 1 < num_tiles:
            next_page = page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)

    unit = scale * 1.4426950408889634
    count = 0
    left = num_tiles
    for pair in range(num_pairs):
        stop = gl.minimum(tiles, tile + left)
        q0, q1, acc0, acc1, largest, weight = begin_pair(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, page_table_ptr, sinks_ptr, k_ptr, v_ptr, row,
            slot, known, head, stop == tiles, eps, unit, M, P, num_pages, H, KV_HEADS, ROW, D, R, PAGE, TILE, NORM,
            NORM_VALUES, PDL,
        )  # fmt: skip
        for at in range(tile, stop):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            acc0, acc1, largest, weight = attend_tile(
                k_ring, v_ring, stage, q0, q1, acc0, acc1, largest, weight, unit, at * TILE, known, WINDOW
            )
            count += 1
            if fetched < num_tiles:
                fetch(
                    k_desc, v_desc, k_boxes, v_boxes, full, next_page, fetched, next_head, next_tile, next_known,
                    num_pages, KV_HEADS, PAGE,
                )  # fmt: skip
                fetched += 1
                if fetched < num_tiles:
                    next_index, next_head, next_tile, next_slot, next_known = _next_tile(
                        rows_ptr, next_index, next_head, next_tile, next_slot, next_known, KV_HEADS, TILE, WINDOW
                    )
                    next_page = page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)
        if (tile == first_tile(known, TILE, WINDOW)) & (stop == tiles):
            store_whole(out_ptr, row * H + head * G, acc0, acc1, weight, D, G, PAIRED)
        else:
            place = (worker * 2 + gl.minimum(pair, 1)) * G
            store_part(part_ptr, stats_ptr, place, acc0, acc1, largest, weight, D, G, PAIRED)
        left -= stop - tile
        head += 1
        if head == KV_HEADS:
            head = 0
            index += 1
            row, slot, known, tiles = _record(rows_ptr, index)
        tile = first_tile(known, TILE, WINDOW)
    # Who has nothing to do makes room; but not all: the next kernel would find this one at its end too soon.
    if (num_pairs > 0) | (worker < B):
        wait_for_previous(PDL)
        _clear_dead(lengths_ptr, out_ptr, worker, B, H * D, NUM_WORKERS, out_ptr.dtype.element_ty)
