"""Decode attention on Hopper, from a layer's q, k, v rows to attended heads, in Gluon.

A worker is one warp. The copy engine fills its ring of tiles, over the ends of rows and heads too, and begins before
the kernel ahead has ended: old keys and values are there already. The newest token needs no cache: its norms and turns
are computed where it is attended to, and written on the way.

Shape suffixes: D head size; a row's heads are q heads, then k heads, then v heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

_GROUP = gl.constexpr(16)  # rows of a matrix product: q heads of one kv head, at most
_ROW_WORDS = gl.constexpr(4)  # as in decode_shares.py
_WORKER_WORDS = gl.constexpr(12)


@gluon.jit
def _exp2(x):
    """2^x; what would be denormal is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _wait_for_previous(PDL: gl.constexpr):
    """As in overlap.py, which Gluon cannot call."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def _next_tile(rows_ptr, index, head, tile, slot, tiles, KV_HEADS: gl.constexpr):
    """The tile behind a tile in the line: of the same row and head, or the first of the next."""
    tile += 1
    if tile == tiles:
        tile = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            index += 1
            slot = gl.load(rows_ptr + index * _ROW_WORDS + 1)
            tiles = gl.load(rows_ptr + index * _ROW_WORDS + 3)
    return index, head, tile, slot, tiles


@gluon.jit
def _page_of(page_table_ptr, slot, tile, M, TILE: gl.constexpr, PAGE: gl.constexpr):
    return gl.load(page_table_ptr + slot.to(gl.int64) * M + gl.minimum(tile * TILE // PAGE, M - 1))


@gluon.jit
def _fetch(
    k_desc, v_desc, k_ring, v_ring, full, page, count, head, tile, num_pages,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Ask for one tile of keys and values, each in two halves of the head."""
    TILE: gl.constexpr = k_desc.block_shape[0]
    HALF: gl.constexpr = k_desc.block_shape[1]
    STAGES: gl.constexpr = full.shape[0]
    stage = count % STAGES
    position = tile * TILE
    page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    row = (page * KV_HEADS + head) * PAGE + position % PAGE
    bar = full.index(stage)
    mbarrier.expect(bar, 4 * TILE * HALF * 2)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, [row, half * HALF], bar, k_ring.index(stage * 2 + half))
        tma.async_copy_global_to_shared(v_desc, [row, half * HALF], bar, v_ring.index(stage * 2 + half))


@gluon.jit
def _load_halves(ptr, columns, HALF: gl.constexpr):
    return gl.load(ptr + columns).to(gl.float32), gl.load(ptr + HALF + columns).to(gl.float32)


@gluon.jit
def _turn(x, y, squares, norm0, norm1, cos, sin, eps, HALF: gl.constexpr, NORM: gl.constexpr):
    """Heads in two halves, normed and turned by their position; fp32, to be rounded once."""
    if NORM:
        inverse = gl.rsqrt(squares / (2 * HALF) + eps)
        x *= inverse * norm0
        y *= inverse * norm1
    return x * cos - y * sin, y * cos + x * sin


@gluon.jit
def _clean(v_ring, stage, start, known, HALF: gl.constexpr):
    """Cells beyond a row's end may hold anything, NaN too."""
    TILE: gl.constexpr = v_ring.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [1, 1], [1, 0])
    positions = start + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    for half in gl.static_range(2):
        part = v_ring.index(stage * 2 + half)
        part.store(gl.where((positions < known)[:, None], part.load(LAYOUT), 0.0).to(v_ring.dtype))
    fence_async_shared()


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


@gluon.jit
def _attend_tile(k_ring, v_ring, stage, q0, q1, acc0, acc1, largest, weight, unit, start, known):
    """One tile in the softmax so far."""
    MMA: gl.constexpr = acc0.type.layout
    TILE: gl.constexpr = k_ring.shape[1]
    KEYS: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    s = gl.zeros((_GROUP, TILE), gl.float32, MMA)
    s = mma_v2(q0, k_ring.index(stage * 2).permute((1, 0)).load(KEYS), s)
    s = mma_v2(q1, k_ring.index(stage * 2 + 1).permute((1, 0)).load(KEYS), s)
    positions = start + gl.arange(0, TILE, gl.SliceLayout(0, MMA))
    s = gl.where((positions < known)[None, :], s * unit, float("-inf"))
    new = gl.maximum(largest, gl.max(s, 1))
    shrink = _exp2(largest - new)
    weights = _exp2(s - new[:, None])
    weight = weight * shrink + gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS)
    acc0 = mma_v2(p, v_ring.index(stage * 2).load(KEYS), acc0 * shrink[:, None])
    acc1 = mma_v2(p, v_ring.index(stage * 2 + 1).load(KEYS), acc1 * shrink[:, None])
    return acc0, acc1, new, weight


@gluon.jit(do_not_specialize=["B", "M", "P", "num_pages"], do_not_specialize_on_alignment=["B", "M", "P", "num_pages"])
def hopper_decode_kernel(
    k_desc, v_desc, k_ptr, v_ptr, qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, page_table_ptr, rows_ptr, workers_ptr,
    lengths_ptr, part_ptr, stats_ptr, out_ptr, eps, scale, B, M, P, num_pages,
    H: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    NUM_WORKERS: gl.constexpr, NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_WORKERS,), one warp each: a worker walks over its stretch of tiles."""
    TILE: gl.constexpr = k_desc.block_shape[0]
    HALF: gl.constexpr = D // 2
    G: gl.constexpr = H // KV_HEADS
    dtype: gl.constexpr = k_desc.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [1, 1], [1, 0])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES * 2, TILE, HALF], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES * 2, TILE, HALF], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for barrier in gl.static_range(STAGES):
        mbarrier.init(full.index(barrier), count=1)

    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)
    worker = gl.program_id(0)
    record_ptr = workers_ptr + worker * _WORKER_WORDS
    index = gl.load(record_ptr)
    head = gl.load(record_ptr + 1)
    tile = gl.load(record_ptr + 2)
    num_pairs = gl.load(record_ptr + 3)
    num_tiles = gl.load(record_ptr + 4)
    # The line as the copy engine sees it: some tiles ahead. Its next page is looked up a tile ahead of that.
    next_index = index
    next_head = head
    next_tile = tile
    next_slot = index
    next_tiles = index
    next_page = index
    if num_tiles > 0:
        next_slot = gl.load(rows_ptr + index * _ROW_WORDS + 1)
        next_tiles = gl.load(rows_ptr + index * _ROW_WORDS + 3)
        next_page = _page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)
    fetched = gl.minimum(num_tiles, STAGES)
    for ahead in range(fetched):
        _fetch(k_desc, v_desc, k_ring, v_ring, full, next_page, ahead, next_head, next_tile, num_pages, KV_HEADS, PAGE)
        next_index, next_head, next_tile, next_slot, next_tiles = _next_tile(
            rows_ptr, next_index, next_head, next_tile, next_slot, next_tiles, KV_HEADS
        )
        if ahead + 1 < num_tiles:
            next_page = _page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)

    unit = scale * 1.4426950408889634
    columns = gl.arange(0, HALF, gl.SliceLayout(0, LOADS))
    heads = gl.arange(0, _GROUP, gl.SliceLayout(1, LOADS))
    group = gl.arange(0, _GROUP, gl.SliceLayout(1, MMA))
    half = gl.arange(0, HALF, gl.SliceLayout(0, MMA))
    count = 0
    left = num_tiles
    for pair in range(num_pairs):
        row = gl.load(rows_ptr + index * _ROW_WORDS).to(gl.int64)
        slot = gl.load(rows_ptr + index * _ROW_WORDS + 1)
        known = gl.load(rows_ptr + index * _ROW_WORDS + 2)
        tiles = gl.load(rows_ptr + index * _ROW_WORDS + 3)
        stop = gl.minimum(tiles, tile + left)
        cos, sin = _load_halves(cos_sin_ptr + gl.minimum(known, P - 1).to(gl.int64) * D, columns, HALF)
        q_norm0, q_norm1 = _load_halves(q_norm_ptr, columns, HALF)
        k_norm0, k_norm1 = _load_halves(k_norm_ptr, columns, HALF)
        own_page = _page_of(page_table_ptr, slot, known // TILE, M, TILE, PAGE).to(gl.int64)
        # Up to here nothing was read that the kernel ahead writes. From the second time on this waits for nothing.
        _wait_for_previous(PDL)
        heads_ptr = qkv_ptr + row * ((H + 2 * KV_HEADS) * D)
        q_ptrs = heads_ptr + (head * G + heads)[:, None] * D + columns[None, :]
        mine = (heads < G)[:, None] & (columns < HALF)[None, :]
        x0 = gl.load(q_ptrs, mask=mine, other=0.0).to(gl.float32)
        x1 = gl.load(q_ptrs + HALF, mask=mine, other=0.0).to(gl.float32)
        k0, k1 = _load_halves(heads_ptr + (H + head) * D, columns, HALF)
        v0 = gl.load(heads_ptr + (H + KV_HEADS + head) * D + half)
        v1 = gl.load(heads_ptr + (H + KV_HEADS + head) * D + HALF + half)
        q0, q1 = _turn(
            x0, x1, gl.sum(x0 * x0 + x1 * x1, 1)[:, None], q_norm0[None, :], q_norm1[None, :], cos[None, :],
            sin[None, :], eps, HALF, NORM,
        )  # fmt: skip
        q0 = q0.to(dtype)
        q1 = q1.to(dtype)
        largest = gl.full((_GROUP,), float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        weight = gl.zeros((_GROUP,), gl.float32, gl.SliceLayout(1, MMA))
        acc0 = gl.zeros((_GROUP, HALF), gl.float32, MMA)
        acc1 = gl.zeros((_GROUP, HALF), gl.float32, MMA)
        if stop == tiles:
            # The newest token is the softmax's first.
            k0, k1 = _turn(k0, k1, gl.sum(k0 * k0 + k1 * k1, 0), k_norm0, k_norm1, cos, sin, eps, HALF, NORM)
            key0 = k0.to(dtype)
            key1 = k1.to(dtype)
            products = q0.to(gl.float32) * key0.to(gl.float32)[None, :]
            products += q1.to(gl.float32) * key1.to(gl.float32)[None, :]
            largest = gl.convert_layout(gl.sum(products, 1) * unit, gl.SliceLayout(1, MMA))
            weight += 1.0
            acc0 += v0.to(gl.float32)[None, :]
            acc1 += v1.to(gl.float32)[None, :]
            cell = ((own_page * KV_HEADS + head) * PAGE + known % PAGE) * D
            inside = (own_page > 0) & (own_page < num_pages)
            gl.store(k_ptr + cell + columns, key0, mask=inside & (columns < HALF))
            gl.store(k_ptr + cell + HALF + columns, key1, mask=inside & (columns < HALF))
            gl.store(v_ptr + cell + half, v0, mask=inside & (half < HALF))
            gl.store(v_ptr + cell + HALF + half, v1, mask=inside & (half < HALF))
        q0 = gl.convert_layout(q0, QUERIES)
        q1 = gl.convert_layout(q1, QUERIES)
        for at in range(tile, stop):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            if at * TILE + TILE > known:
                _clean(v_ring, stage, at * TILE, known, HALF)
            acc0, acc1, largest, weight = _attend_tile(
                k_ring, v_ring, stage, q0, q1, acc0, acc1, largest, weight, unit, at * TILE, known
            )
            count += 1
            if fetched < num_tiles:
                _fetch(
                    k_desc, v_desc, k_ring, v_ring, full, next_page, fetched, next_head, next_tile, num_pages,
                    KV_HEADS, PAGE,
                )  # fmt: skip
                fetched += 1
                if fetched < num_tiles:
                    next_index, next_head, next_tile, next_slot, next_tiles = _next_tile(
                        rows_ptr, next_index, next_head, next_tile, next_slot, next_tiles, KV_HEADS
                    )
                    next_page = _page_of(page_table_ptr, next_slot, next_tile, M, TILE, PAGE)
        valid = (group < G)[:, None] & (half < HALF)[None, :]
        if (tile == 0) & (stop == tiles):
            out_ptrs = out_ptr + (row * H + head * G + group)[:, None] * D + half[None, :]
            gl.store(out_ptrs, (acc0 / weight[:, None]).to(dtype), mask=valid)
            gl.store(out_ptrs + HALF, (acc1 / weight[:, None]).to(dtype), mask=valid)
        else:
            places = (worker * 2 + gl.minimum(pair, 1)) * G + group
            gl.store(part_ptr + places[:, None] * D + half[None, :], acc0, mask=valid)
            gl.store(part_ptr + places[:, None] * D + HALF + half[None, :], acc1, mask=valid)
            gl.store(stats_ptr + places * 2, largest, mask=group < G)
            gl.store(stats_ptr + places * 2 + 1, weight, mask=group < G)
        left -= stop - tile
        tile = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            index += 1
    # Who has nothing to do makes room; but not all: the next kernel would find this one at its end too soon.
    if (num_pairs > 0) | (worker < B):
        _wait_for_previous(PDL)
        _clear_dead(lengths_ptr, out_ptr, worker, B, H * D, NUM_WORKERS, dtype)
