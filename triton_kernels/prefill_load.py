"""The loading warp of prefill attention on Hopper, the sizes of what it loads, and whose turn a tile is.

Keys and values come in tiles of 128 tokens, two pieces of 64 from wherever their pages are; of heads of 256 numbers in
tiles of one piece.

Shape suffixes: H q heads, D head size, M pages of a slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

PIECE = gl.constexpr(64)
ROWS = gl.constexpr(64)  # queries of a warp group
RECORD = gl.constexpr(8)  # as in prefill_work.py


@gluon.constexpr_function
def keys_of(D):
    """Keys of a tile: two stages of keys and of values have to fit shared memory beside two groups' queries."""
    return 128 if D <= 128 else 64


@gluon.jit
def start_next(PDL: gl.constexpr):
    """Let it start, and wait for the kernel ahead, as `overlap.py` has it: in one piece."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
        )


@gluon.jit
def _load_tile(
    desc, parts, full, free, count, pages_ptr, start, M, num_pages, kv_head,
    KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch one tile of keys or values, once its place in the ring is free."""
    TILE: gl.constexpr = keys_of(D)
    WIDTH: gl.constexpr = desc.block_shape[1]
    COLUMNS: gl.constexpr = D // WIDTH
    stage = count % STAGES
    bar = full.index(stage)
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(bar, TILE * D * desc.dtype.primitive_bitwidth // 8)
    for piece in gl.static_range(TILE // PIECE):
        position = start + piece * PIECE
        page = gl.load(pages_ptr + gl.minimum(position // PAGE, M - 1))
        # What a table holds beyond its sequence's end is loaded, and counts for nothing.
        page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
        row = (page * KV_HEADS + kv_head) * PAGE + position % PAGE
        for column in gl.static_range(COLUMNS):
            place = (stage * COLUMNS + column) * (TILE // PIECE) + piece
            tma.async_copy_global_to_shared(desc, [row, column * WIDTH], bar, parts.index(place))


@gluon.jit
def num_turns(num_pairs, NUM_PROGRAMS: gl.constexpr):
    """How many pairs of a tile and a head this program has."""
    whole = num_pairs // NUM_PROGRAMS
    return whole + (pair_of(whole, NUM_PROGRAMS) < num_pairs).to(gl.int32)


@gluon.jit
def pair_of(turn, NUM_PROGRAMS: gl.constexpr):
    """Which pair is this program's next. Pairs come heavy ones first, and are dealt out there and back again, so that
    who has the heaviest of one round has the lightest of the next."""
    program = gl.program_id(0)
    return turn * NUM_PROGRAMS + gl.where((turn & 1) == 1, NUM_PROGRAMS - 1 - program, program)


@gluon.jit
def first_keys(record_ptr, TILE: gl.constexpr, PARTS: gl.constexpr, WINDOW: gl.constexpr):
    """The tile of keys with which a tile of queries begins, or this part of one."""
    tile = 0
    if PARTS:
        tile = gl.load(record_ptr + 6)
    if WINDOW > 0:
        tile = gl.maximum(gl.load(record_ptr + 2) + 1 - WINDOW, 0) // TILE
    return tile


@gluon.jit
def load_tiles(
    copies, work, H: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    PARTS: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The loading warp: queries of a tile, then its keys and values, tile after tile."""
    q_desc, k_desc, v_desc, q_ring, k_parts, v_parts, q_full, q_free, k_full, k_free, v_full, v_free = copies
    tiles_ptr, page_table_ptr, num_pairs, M, num_pages = work
    TILE: gl.constexpr = keys_of(D)
    STAGES: gl.constexpr = k_full.shape[0]
    AHEAD: gl.constexpr = q_full.shape[0]
    GROUPS: gl.constexpr = q_ring.shape[0] // AHEAD
    count = 0
    for turn in range(num_turns(num_pairs, NUM_PROGRAMS)):
        pair = pair_of(turn, NUM_PROGRAMS)
        record_ptr = tiles_ptr + pair // (H // HEADS) * RECORD
        head = pair % (H // HEADS) * HEADS
        kv_head = head // (H // KV_HEADS)
        first = gl.load(record_ptr)
        pages_ptr = page_table_ptr + gl.load(record_ptr + 3).to(gl.int64) * M
        seen = gl.load(record_ptr + 4)
        place = turn % AHEAD
        bar = q_full.index(place)
        mbarrier.wait(q_free.index(place), (turn // AHEAD & 1) ^ 1)
        mbarrier.expect(bar, GROUPS * ROWS * D * 2)
        for group in gl.static_range(GROUPS):
            row = first + (group * ROWS if HEADS == 1 else 0)
            column = (head + (group if HEADS == 2 else 0)) * D
            tma.async_copy_global_to_shared(q_desc, [row, column], bar, q_ring.index(GROUPS * place + group))
        for start in range(first_keys(record_ptr, TILE, PARTS, WINDOW) * TILE, seen, TILE):
            _load_tile(
                k_desc, k_parts, k_full, k_free, count, pages_ptr, start, M, num_pages, kv_head, KV_HEADS, D, PAGE,
                STAGES,
            )  # fmt: skip
            _load_tile(
                v_desc, v_parts, v_full, v_free, count, pages_ptr, start, M, num_pages, kv_head, KV_HEADS, D, PAGE,
                STAGES,
            )  # fmt: skip
            count += 1
