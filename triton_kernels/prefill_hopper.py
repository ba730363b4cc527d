"""Prefill attention on Hopper: a warp that only loads, and two warp groups that only compute, in Gluon.

Each group owns half of a tile's queries and runs its softmax while the matrix units work for it on the tile before, and
for the other group. The warp is in `prefill_load.py`.

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

from tercet.triton_kernels.prefill_load import BLOCK_Q, PIECE, RECORD, TILE, load_tiles


@gluon.jit
def _exp2(x):
    """2^x; what would be denormal is 0. Called impure, so that it stays where it is among products and waits."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def _weigh(s, largest, unit, query, start, MASKED: gl.constexpr):
    """Softmax of one more tile of scores: weights, the largest score now, and what the sums so far shrink by."""
    if MASKED:
        layout: gl.constexpr = s.type.layout
        rows = query + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
        columns = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        s = gl.where(columns[None, :] <= rows[:, None], s, float("-inf"))
    new = gl.maximum(largest, gl.max(s, 1) * unit)
    finite = new
    if MASKED:
        finite = gl.where(new == float("-inf"), 0.0, new)
    weights = _exp2(s * unit - finite[:, None])
    return weights, new, _exp2(largest - finite)


@gluon.jit
def _advance(
    q, k_ring, v_ring, k_full, k_free, v_full, v_free, turns, acc, p, largest, weight, unit, query, start, count, move,
    WHICH: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of tile `count` of the ring and values of the one before it, together; then the softmax of the scores."""
    STAGES: gl.constexpr = k_ring.shape[0]
    ROWS: gl.constexpr = q.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    stage = count % STAGES
    previous = (count - 1) % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    # The groups take turns: one multiplies while the other is at its softmax.
    mbarrier.wait(turns.index(WHICH), move & 1)
    zeros = gl.zeros((ROWS, TILE), gl.float32, SCORES)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(p, v_ring.index(previous), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - WHICH))
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    weights, new, shrink = _weigh(s, largest, unit, query, start, MASKED)
    weight = weight * shrink + gl.sum(weights, 1)
    # A branch between them keeps the compiler from moving the softmax behind the products' end.
    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_free.index(previous))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(weights.to(v_ring.dtype), p.type.layout)
    return acc, p, new, weight


@gluon.jit
def _clean(v_parts, cleaned, stage, start, known, turn, D: gl.constexpr, WHICH: gl.constexpr):
    """Cells beyond the sequence's end may hold anything, NaN too: one group clears them in each piece of a tile."""
    COLUMNS: gl.constexpr = D // PIECE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    positions = start + WHICH * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT))
    for column in gl.static_range(COLUMNS):
        part = v_parts.index((stage * COLUMNS + column) * (TILE // PIECE) + WHICH)
        values = part.load(LAYOUT)
        part.store(gl.where((positions < known)[:, None], values, 0.0).to(v_parts.dtype))
    fence_async_shared()
    mbarrier.arrive(cleaned)
    mbarrier.wait(cleaned, turn & 1)


@gluon.jit
def _attend(
    q_ring, k_ring, v_ring, v_parts, q_full, q_free, k_full, k_free, v_full, v_free, cleaned, turns,
    tiles_ptr, out_ptr, unit, num_pairs,
    H: gl.constexpr, D: gl.constexpr, WHICH: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp group: half of each tile's queries, from the first scores to the store."""
    STAGES: gl.constexpr = k_ring.shape[0]
    ROWS: gl.constexpr = q_ring.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    q = q_ring.index(WHICH)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    count = 0
    turn = 0
    move = 0
    num_cleaned = 0
    for pair in range(gl.program_id(0), num_pairs, NUM_PROGRAMS):
        record_ptr = tiles_ptr + pair // H * RECORD
        first = gl.load(record_ptr)
        num_queries = gl.load(record_ptr + 1)
        query = gl.load(record_ptr + 2) + WHICH * ROWS
        seen = gl.load(record_ptr + 4)
        known = gl.load(record_ptr + 5)
        last = gl.cdiv(seen, TILE)
        # Tiles that every query of the group sees whole need no mask; the first goes with one, whatever it is.
        whole = gl.minimum(gl.maximum((query + 1) // TILE, 1), last)

        mbarrier.wait(q_full, turn & 1)
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        zeros = gl.zeros((ROWS, TILE), gl.float32, SCORES)
        s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(stage))
        largest = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        weights, largest, _ = _weigh(s, largest, unit, query, 0, True)
        weight = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS)
        acc = gl.zeros((ROWS, D), gl.float32, SUMS)
        mbarrier.wait(v_full.index(stage), count // STAGES & 1)
        for tile in range(1, whole):
            count += 1
            acc, p, largest, weight = _advance(
                q, k_ring, v_ring, k_full, k_free, v_full, v_free, turns, acc, p, largest, weight, unit, query,
                tile * TILE, count, move, WHICH, False,
            )  # fmt: skip
            move += 1
        for tile in range(whole, last):
            count += 1
            acc, p, largest, weight = _advance(
                q, k_ring, v_ring, k_full, k_free, v_full, v_free, turns, acc, p, largest, weight, unit, query,
                tile * TILE, count, move, WHICH, True,
            )  # fmt: skip
            move += 1
        mbarrier.arrive(q_free)
        turn += 1
        stage = count % STAGES
        if known < last * TILE:
            _clean(v_parts, cleaned, stage, (last - 1) * TILE, known, num_cleaned, D, WHICH)
            num_cleaned += 1
        acc = warpgroup_mma(p, v_ring.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(stage))
        count += 1

        inverse = gl.convert_layout(1.0 / weight, gl.SliceLayout(1, SUMS))
        tokens = (first + WHICH * ROWS + rows).to(gl.int64)
        out_ptrs = out_ptr + (tokens * H + pair % H)[:, None] * D + columns[None, :]
        inside = (WHICH * ROWS + rows < num_queries)[:, None] & (columns < D)[None, :]
        gl.store(out_ptrs, (acc * inverse[:, None]).to(v_ring.dtype), mask=inside)


@gluon.jit
def _clear_padding(
    tiles_ptr, out_ptr, begin, end, H: gl.constexpr, D: gl.constexpr, NUM_PROGRAMS: gl.constexpr, dtype: gl.constexpr
):
    """Zeros for tokens of no chunk, so that nothing unheard of goes on to the next layer."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros((BLOCK_Q, D), dtype, LAYOUT)
    for pair in range(begin + gl.program_id(0), end, NUM_PROGRAMS):
        record_ptr = tiles_ptr + pair // H * RECORD
        tokens = (gl.load(record_ptr) + rows).to(gl.int64)
        inside = (rows < gl.load(record_ptr + 1))[:, None] & (columns < D)[None, :]
        gl.store(out_ptr + (tokens * H + pair % H)[:, None] * D + columns[None, :], zeros, mask=inside)


@gluon.jit(do_not_specialize=["N", "M", "num_pages"], do_not_specialize_on_alignment=["N", "M", "num_pages"])
def hopper_prefill_kernel(
    q_desc, k_desc, v_desc, tiles_ptr, page_table_ptr, out_ptr, scale, N, M, num_pages,
    H: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor walks over pairs of a tile and a head, heavy ones first."""
    COLUMNS: gl.constexpr = D // PIECE
    dtype: gl.constexpr = q_desc.dtype
    q_ring = gl.allocate_shared_memory(dtype, [2, BLOCK_Q // 2, D], q_desc.layout)
    pieces: gl.constexpr = [STAGES * COLUMNS * (TILE // PIECE), PIECE, PIECE]
    k_parts = gl.allocate_shared_memory(dtype, pieces, k_desc.layout)
    v_parts = gl.allocate_shared_memory(dtype, pieces, v_desc.layout)
    # Pieces side by side are laid out as one tile is.
    k_ring = k_parts._reinterpret(dtype, [STAGES, TILE, D], k_desc.layout)
    v_ring = v_parts._reinterpret(dtype, [STAGES, TILE, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    cleaned = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(cleaned, count=2)
    mbarrier.arrive(turns.index(0))
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
        )
    num_pairs = gl.load(tiles_ptr + N * RECORD) * H
    _clear_padding(tiles_ptr, out_ptr, num_pairs, gl.load(tiles_ptr + N * RECORD + 1) * H, H, D, NUM_PROGRAMS, dtype)
    unit = scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (
                _attend,
                (q_ring, k_ring, v_ring, v_parts, q_full, q_free, k_full, k_free, v_full, v_free, cleaned, turns,
                 tiles_ptr, out_ptr, unit, num_pairs, H, D, zero, NUM_PROGRAMS),
            ),
            (
                _attend,
                (q_ring, k_ring, v_ring, v_parts, q_full, q_free, k_full, k_free, v_full, v_free, cleaned, turns,
                 tiles_ptr, out_ptr, unit, num_pairs, H, D, one, NUM_PROGRAMS),
            ),
            (
                load_tiles,
                (q_desc, k_desc, v_desc, q_ring, k_parts, v_parts, q_full, q_free, k_full, k_free, v_full, v_free,
                 tiles_ptr, page_table_ptr, num_pairs, M, num_pages, H, KV_HEADS, D, PAGE, NUM_PROGRAMS),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
