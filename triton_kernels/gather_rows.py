"""Tokens' rows and their experts' weights on their way to shared memory, on Hopper, in Gluon: warps that only load.

Rows are gathered where they lie (`expert_work.py`), which the copy engine cannot do: the warps bring them themselves,
16 bytes a thread. Weights come by the copy engine.

Shape suffixes: M places of a tile, K reduced size, N output columns of one expert.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tercet.triton_kernels.overlap import wait_for_previous
from tercet.triton_kernels.ring import fetch_weights, make_barriers

_LATE = gl.constexpr(2)
"""Stages of rows that are on their way while more are asked for."""


@gluon.constexpr_function
def _rows_layout(K, bits):
    """A thread brings 16 bytes of a row of numbers of so many bits, and neighbours the next ones."""
    threads = K * bits // 128
    return gl.BlockedLayout([1, 128 // bits], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def make_gathered_ring(
    x_ptr, w_desc, X_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """Shared memory for stages of rows and of BLOCKS of weights, and barriers that say which are free, of READERS warp
    groups, and which full."""
    x_ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], X_LAYOUT)
    shape: gl.constexpr = [STAGES * BLOCKS, w_desc.block_shape[0], w_desc.block_shape[1]]
    w_ring = gl.allocate_shared_memory(w_desc.dtype, shape, w_desc.layout)
    free, full = make_barriers(STAGES, READERS, 2)  # who asks for weights, and who brings rows
    return x_ring, w_ring, free, full


@gluon.jit
def gather_stages(
    x_ptr, w_desc, pairs_ptr, tile_experts_ptr, x_ring, w_ring, free, full, num_tiles, PER_ROW: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, X: gl.constexpr, FOUR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring, stage after stage, tile after tile: a stage of rows is said to be there when _LATE more are on
    their way. Of K columns x has the first X; the others are zeros."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    WIDTH: gl.constexpr = w_ring.shape[0] // STAGES * w_ring.shape[1]
    BYTES: gl.constexpr = WIDTH * w_ring.shape[2] * w_ring.dtype.primitive_bitwidth // 8
    LAYOUT: gl.constexpr = _rows_layout(BLOCK_K, x_ring.dtype.primitive_bitwidth)
    num_n: gl.constexpr = (N + WIDTH - 1) // WIDTH
    places = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    wait_for_previous(PDL)
    count = 0
    for index in range(gl.program_id(0), num_tiles * num_n, gl.num_programs(0)):
        tile = index // num_n
        expert = gl.load(tile_experts_ptr + tile)
        if expert >= 0:
            start_n = expert * N + index % num_n * WIDTH
            rows = gl.maximum(gl.load(pairs_ptr + tile * BLOCK_M + places), 0) // PER_ROW
            x_ptrs = x_ptr + rows.to(gl.int64)[:, None] * X + columns[None, :]
            for k in range(0, K, BLOCK_K):
                stage = count % STAGES
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                fetch_weights(w_desc, w_ring, full, stage, start_n, k, BYTES, FOUR)
                if X < K:
                    there = (columns < X - k)[None, :]
                    async_copy.async_copy_global_to_shared(x_ring.index(stage), x_ptrs + k, mask=there)
                else:
                    async_copy.async_copy_global_to_shared(x_ring.index(stage), x_ptrs + k)
                async_copy.commit_group()
                if count >= _LATE:
                    async_copy.wait_group(_LATE)
                    fence_async_shared()
                    mbarrier.arrive(full.index((count - _LATE) % STAGES))
                count += 1
    async_copy.wait_group(0)
    fence_async_shared()
    for late in gl.static_range(_LATE):
        mbarrier.arrive(full.index((count + STAGES - _LATE + late) % STAGES), pred=count >= _LATE - late)
