"""Shared memory of prefill attention on Hopper: rings of tiles' queries, keys and values, and their barriers.

Shape suffixes: D head size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tercet.triton_kernels.prefill_load import PIECE, ROWS, keys_of


@gluon.jit
def make_rings(
    q_desc, dtype: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr
):
    """Shared memory for tiles' queries, and for keys and values in `dtype`, by pieces and by tiles; and barriers."""
    TILE: gl.constexpr = keys_of(D)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [AHEAD * GROUPS, ROWS, D], q_desc.layout)
    pieces: gl.constexpr = [STAGES * (D // PIECE) * (TILE // PIECE), PIECE, PIECE]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_parts = gl.allocate_shared_memory(dtype, pieces, LAYOUT)
    v_parts = gl.allocate_shared_memory(dtype, pieces, LAYOUT)
    # Pieces side by side are laid out as one tile is.
    k_ring = k_parts._reinterpret(dtype, [STAGES, TILE, D], LAYOUT)
    v_ring = v_parts._reinterpret(dtype, [STAGES, TILE, D], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    cleaned = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=GROUPS)
        mbarrier.init(v_free.index(stage), count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    for place in gl.static_range(AHEAD):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_free.index(place), count=GROUPS)
    mbarrier.init(cleaned, count=GROUPS)
    mbarrier.arrive(turns.index(0))
    rings = q_ring, k_ring, v_ring, v_parts, q_full, q_free, k_full, k_free, v_full, v_free, cleaned, turns
    return rings, k_parts
