"""Products for many rows on Hopper: a warp that only loads, and two warp groups that only multiply, in Gluon.

The loading warp runs ahead through a ring of shared memory, over the ends of tiles too, so that the matrix units find
the next tile ready while a group stores the last one. K in plain order: the same bits as the portable kernels. Rows and
weights may both be in FP8, a scale beside each row of either (`round_rows.py`).

Shape suffixes: M rows, K reduced size, N output size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tercet.triton_kernels.matmul_epilogue import ADD, GATE, gate_pairs
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.ring import make_barriers


@gluon.jit
def tile_of(index, num_m, num_n, GROUP_M: gl.constexpr):
    """Tiles in groups of GROUP_M tile rows, so that tiles in flight together share what the L2 cache holds."""
    group = index // (GROUP_M * num_n)
    first_m = group * GROUP_M
    size_m = gl.minimum(num_m - first_m, GROUP_M)
    within = index % (GROUP_M * num_n)
    return first_m + within % size_m, within // size_m


@gluon.jit
def make_ring(x_desc, w_desc, STAGES: gl.constexpr):
    """Shared memory for stages of x and of w, and barriers that say which are free, and which full."""
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    free, full = make_barriers(STAGES, 2, 1)
    return x_ring, w_ring, free, full


@gluon.jit
def load_stages(
    x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, num_k, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr
):
    """The loading warp: fill the ring, stage after stage, tile after tile."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n, NUM_PROGRAMS):
        tile_m, tile_n = tile_of(tile, num_m, num_n, GROUP_M)
        for k in range(num_k):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K * x_desc.dtype.primitive_bitwidth // 8)
            tma.async_copy_global_to_shared(x_desc, [tile_m * BLOCK_M, k * BLOCK_K], bar, x_ring.index(stage))
            tma.async_copy_global_to_shared(w_desc, [tile_n * BLOCK_N, k * BLOCK_K], bar, w_ring.index(stage))
            count += 1


@gluon.constexpr_function
def sums_layout(block_n, bits=16):
    """Of a warp group's sums of products of numbers of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 256 // bits])


@gluon.jit
def multiply_stages(x_ring, w_ring, free, full, count, num_k, WHICH: gl.constexpr):
    """One warp group's half of a tile's rows, from the ring: sums in fp32, and how many stages it has seen by now."""
    STAGES: gl.constexpr = x_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1] // 2
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, sums_layout(BLOCK_N, x_ring.dtype.primitive_bitwidth))
    for k in range(num_k):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        x = x_ring.index(stage).slice(WHICH * ROWS, ROWS)
        acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), acc, is_async=True)
        # The product before this one has ended: its stage is free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=k > 0)
        count += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
    return acc, count


@gluon.jit
def _scaled(acc, x_scales_ptr, w_scales_ptr, row, column, M, N: gl.constexpr):
    """Sums times the scales of their rows and columns."""
    rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    acc = acc * gl.load(x_scales_ptr + gl.minimum(rows, M - 1))[:, None]
    return acc * gl.load(w_scales_ptr + gl.minimum(columns, N - 1))[None, :]


@gluon.jit
def _send(y, out_desc, staging, row, column, LAYOUT: gl.constexpr):
    """Round a part of the tile and send it out through `staging`."""
    staging.store(gl.convert_layout(y.to(out_desc.dtype), LAYOUT))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], staging)


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, out_ptr, staging, held, M, num_m, num_n,
    num_k, N: gl.constexpr, WHICH: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    EPILOGUE: gl.constexpr, SCALED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """One warp group: half of each tile's rows, from the first product to the store."""
    ROWS: gl.constexpr = x_ring.shape[1] // 2
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    HALF_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    count = 0
    phase = 0
    for tile in range(gl.program_id(0), num_m * num_n, NUM_PROGRAMS):
        tile_m, tile_n = tile_of(tile, num_m, num_n, GROUP_M)
        row = tile_m * (2 * ROWS) + WHICH * ROWS
        column = tile_n * BLOCK_N
        if EPILOGUE == ADD:
            # The residual comes while the products run: its left half to the staging memory, its right to registers.
            tma.store_wait(0)
            mbarrier.expect(held, ROWS * HALF * 2)
            tma.async_copy_global_to_shared(out_desc, [row, column], held, staging)
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, HALF_LAYOUT))
            columns = column + HALF + gl.arange(0, HALF, gl.SliceLayout(0, HALF_LAYOUT))
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            residual = gl.load(out_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :], mask=inside, other=0.0)
        acc, count = multiply_stages(x_ring, w_ring, free, full, count, num_k, WHICH)
        if SCALED:
            acc = _scaled(acc, x_scales_ptr, w_scales_ptr, row, column, M, N)
        if HAS_BIAS:
            biased = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
            acc += gl.load(bias_ptr + biased, mask=biased < N, other=0.0).to(gl.float32)[None, :]
        if EPILOGUE == GATE:
            y = gate_pairs(acc, ROWS, BLOCK_N)
            tma.store_wait(0)
            _send(y, out_desc, staging, row, column // 2, HALF_LAYOUT)
        else:
            left, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, HALF)), (0, 2, 1)))
            left = gl.convert_layout(left, HALF_LAYOUT)
            right = gl.convert_layout(right, HALF_LAYOUT)
            if EPILOGUE == ADD:
                mbarrier.wait(held, phase)
                phase ^= 1
                left += staging.load(HALF_LAYOUT).to(gl.float32)
                right += residual.to(gl.float32)
            else:
                tma.store_wait(0)
            _send(left, out_desc, staging, row, column, HALF_LAYOUT)
            tma.store_wait(0)
            _send(right, out_desc, staging, row, column + HALF, HALF_LAYOUT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def hopper_kernel(
    x_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, out_ptr, rows_ptr, M, N: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr, EPILOGUE: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,), or fewer if there are fewer tiles: programs walk over them; TMA clips what lies outside.

    SCALED: x and weights are in FP8, a scale beside each row of either.
    """
    if HAS_ROWS:  # how many there are in truth
        M = gl.minimum(M, gl.load(rows_ptr))
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    num_m = gl.cdiv(M, BLOCK_M)
    num_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_k: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    x_ring, w_ring, free, full = make_ring(x_desc, w_desc, STAGES)
    shape: gl.constexpr = [BLOCK_M // 2, BLOCK_N // 2]
    staging0 = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    staging1 = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    held0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    held1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(held0, count=1)
    mbarrier.init(held1, count=1)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    let_next_start(PDL)
    wait_for_previous(PDL)
    gl.warp_specialize(
        [
            (
                _multiply,
                (x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, out_ptr, staging0, held0,
                 M, num_m, num_n, num_k, N, zero, GROUP_M, NUM_PROGRAMS, EPILOGUE, SCALED, HAS_BIAS),
            ),
            (
                _multiply,
                (x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, out_ptr, staging1, held1,
                 M, num_m, num_n, num_k, N, one, GROUP_M, NUM_PROGRAMS, EPILOGUE, SCALED, HAS_BIAS),
            ),
            (load_stages, (x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, num_k, GROUP_M, NUM_PROGRAMS)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
