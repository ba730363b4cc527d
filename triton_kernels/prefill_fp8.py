"""Prefill attention on Hopper over a cache in FP8: that of `prefill_hopper.py`, and a warp group that turns tiles.

Shape suffixes: H q heads, D head size, M pages of a slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tercet.triton_kernels.prefill_cells import turn_tiles
from tercet.triton_kernels.prefill_hopper import attend
from tercet.triton_kernels.prefill_load import PIECE, ROWS, keys_of, load_tiles
from tercet.triton_kernels.prefill_rings import make_rings
from tercet.triton_kernels.prefill_store import begin_step


@gluon.jit
def _make_room(desc, D: gl.constexpr):
    """For one tile as it is in the cache: by pieces and as a whole; and its barriers."""
    TILE: gl.constexpr = keys_of(D)
    pieces = gl.allocate_shared_memory(desc.dtype, [TILE // PIECE, PIECE, D], desc.layout)
    there = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    gone = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(there.index(0), count=1)
    mbarrier.init(gone.index(0), count=1)
    return pieces, pieces._reinterpret(desc.dtype, [TILE, D], desc.layout), there, gone


@gluon.jit(do_not_specialize=["N", "M", "num_pages"], do_not_specialize_on_alignment=["N", "M", "num_pages"])
def fp8_prefill_kernel(
    q_desc, k_desc, v_desc, tiles_ptr, page_table_ptr, ends_ptr, sinks_ptr, out_ptr, partial_ptr, stats_ptr, scale, N,
    M, num_pages,
    H: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, PARTS: gl.constexpr,
    WINDOW: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid and constants as of `hopper_prefill_kernel`."""
    rings, _ = make_rings(q_desc, gl.float16, D, STAGES, GROUPS, AHEAD)
    q_ring, k_ring, v_ring, _, q_full, q_free, k_full, k_free, v_full, v_free, _, _ = rings
    k_pieces, k_cells, k_there, k_gone = _make_room(k_desc, D)
    v_pieces, v_cells, v_there, v_gone = _make_room(v_desc, D)
    num_pairs = begin_step(tiles_ptr, out_ptr, N, H, D, HEADS, GROUPS // HEADS * ROWS, NUM_PROGRAMS, PDL)
    unit = scale * 1.4426950408889634
    copies = q_desc, k_desc, v_desc, q_ring, k_pieces, v_pieces, q_full, q_free, k_there, k_gone, v_there, v_gone
    work = tiles_ptr, page_table_ptr, num_pairs, M, num_pages
    cells = k_cells, v_cells, k_there, k_gone, v_there, v_gone
    turned = k_ring, v_ring, k_full, k_free, v_full, v_free
    outs = out_ptr, partial_ptr, stats_ptr
    given = tiles_ptr, ends_ptr, sinks_ptr
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (rings, given, outs, unit, num_pairs, H, D, PARTS, WINDOW, HEADS, zero, NUM_PROGRAMS)),
                (attend, (rings, given, outs, unit, num_pairs, H, D, PARTS, WINDOW, HEADS, one, NUM_PROGRAMS)),
                (turn_tiles, (cells, turned, tiles_ptr, num_pairs, H, PARTS, WINDOW, HEADS, NUM_PROGRAMS)),
                (load_tiles, (copies, work, H, KV_HEADS, D, PAGE, PARTS, WINDOW, HEADS, NUM_PROGRAMS)),
            ],
            [4, 4, 1],
            [216, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (rings, given, outs, unit, num_pairs, H, D, PARTS, WINDOW, HEADS, zero, NUM_PROGRAMS)),
                (turn_tiles, (cells, turned, tiles_ptr, num_pairs, H, PARTS, WINDOW, HEADS, NUM_PROGRAMS)),
                (load_tiles, (copies, work, H, KV_HEADS, D, PAGE, PARTS, WINDOW, HEADS, NUM_PROGRAMS)),
            ],
            [4, 1],
            [80, 40],
        )  # fmt: skip
