"""What prefill attention on Hopper does for a cache in FP8, in Gluon: a warp group of its own turns tiles into fp16.

The matrix units take both sides of a product in one type, and FP8 is too little for queries and weights. fp16 has all
numbers of FP8, and more digits than bf16. So keys and values come to shared memory as they are, and go to the rings of
`prefill_hopper.py` by this group, beside products of the tiles ahead.

Shape suffixes: H q heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tercet.triton_kernels.decode_cells import as_factor
from tercet.triton_kernels.prefill_load import RECORD, first_keys, num_turns, pair_of
from tercet.triton_kernels.prefill_store import lines_of

_ROWS = gl.constexpr(32)
"""At once: what a thread has registers for."""


@gluon.jit
def turn_queries(q):
    """A group's queries where they are, in fp16: as matrix products take them."""
    D: gl.constexpr = q.shape[1]
    LAYOUT: gl.constexpr = lines_of(D)
    turned = q._reinterpret(gl.float16, [q.shape[0], D], q.layout)
    turned.store(as_factor(q.load(LAYOUT).to(gl.float32), gl.float8e4nv))
    fence_async_shared()
    return turned


@gluon.jit
def _turn_tile(cells, there, gone, ring, full, free, count):
    """One tile of keys or values, once it is there and its place in the ring is free."""
    STAGES: gl.constexpr = ring.shape[0]
    TILE: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    LAYOUT: gl.constexpr = lines_of(D)
    stage = count % STAGES
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.wait(there.index(0), count & 1)
    for first in gl.static_range(0, TILE, _ROWS):
        numbers = cells.slice(first, _ROWS).load(LAYOUT)
        ring.index(stage).slice(first, _ROWS).store(numbers.to(ring.dtype))
    mbarrier.arrive(gone.index(0))
    fence_async_shared()
    mbarrier.arrive(full.index(stage))


@gluon.jit
def turn_tiles(
    cells, rings, tiles_ptr, num_pairs, H: gl.constexpr, PARTS: gl.constexpr, WINDOW: gl.constexpr,
    HEADS: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The warp group: tiles of keys and values in the order in which they are loaded."""
    k_cells, v_cells, k_there, k_gone, v_there, v_gone = cells
    k_ring, v_ring, k_full, k_free, v_full, v_free = rings
    count = 0
    for turn in range(num_turns(num_pairs, NUM_PROGRAMS)):
        record_ptr = tiles_ptr + pair_of(turn, NUM_PROGRAMS) // (H // HEADS) * RECORD
        begin = first_keys(record_ptr, k_ring.shape[1], PARTS, WINDOW)
        for _ in range(begin, gl.cdiv(gl.load(record_ptr + 4), k_ring.shape[1])):
            _turn_tile(k_cells, k_there, k_gone, k_ring, k_full, k_free, count)
            _turn_tile(v_cells, v_there, v_gone, v_ring, v_full, v_free, count)
            count += 1
