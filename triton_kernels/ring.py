"""Stages of shared memory that go round between warps that load and warp groups that multiply, on Hopper, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr):
    """Which stages are free, of so many warp groups that read them, and which full, by so many that say so."""
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=READERS)
        mbarrier.init(full.index(stage), count=WRITERS)
    return free, full


@gluon.jit
def fetch_weights(w_desc, w_ring, full, stage, start_n, k, BYTES: gl.constexpr, FOUR: gl.constexpr):
    """Ask for a stage's blocks of weights from column k on; BYTES will come with those of x."""
    BLOCKS: gl.constexpr = w_ring.shape[0] // full.shape[0]
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES)
    for block in gl.static_range(BLOCKS):
        place = [start_n + block * w_ring.shape[1], k // 2 if FOUR else k]
        tma.async_copy_global_to_shared(w_desc, place, bar, w_ring.index(stage * BLOCKS + block))
