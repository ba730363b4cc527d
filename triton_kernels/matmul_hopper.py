"""Products for many rows on Hopper: a warp that only loads, and two or three warp groups that only multiply, in Gluon.

The loading warp runs ahead through a ring of shared memory, over the ends of tiles too, so that the matrix units find
the next tile ready while a group stores the last one. K in plain order: the same bits as the portable kernels.

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

_ADD = gl.constexpr(1)
_GATE = gl.constexpr(2)


@gluon.jit
def _tile_of(index, num_m, num_n, GROUP_M: gl.constexpr):
    """Tiles in groups of GROUP_M tile rows, so that tiles in flight together share what the L2 cache holds."""
    group = index // (GROUP_M * num_n)
    first_m = group * GROUP_M
    size_m = gl.minimum(num_m - first_m, GROUP_M)
    within = index % (GROUP_M * num_n)
    return first_m + within % size_m, within // size_m


@gluon.jit
def _load(
    x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, num_k,
    GROUPS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill the ring, stage after stage, tile after tile."""
    STAGES: gl.constexpr = w_ring.shape[0]
    ROWS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n, NUM_PROGRAMS):
        tile_m, tile_n = _tile_of(tile, num_m, num_n, GROUP_M)
        for k in range(num_k):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (GROUPS * ROWS + BLOCK_N) * BLOCK_K * 2)
            for group in gl.static_range(GROUPS):
                row = (tile_m * GROUPS + group) * ROWS
                part = x_ring.index(stage * GROUPS + group)
                tma.async_copy_global_to_shared(x_desc, [row, k * BLOCK_K], bar, part)
            tma.async_copy_global_to_shared(w_desc, [tile_n * BLOCK_N, k * BLOCK_K], bar, w_ring.index(stage))
            count += 1


@gluon.jit
def _right_residual(out_ptr, row, column, M, N: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, LAYOUT.instr_shape[1], gl.SliceLayout(0, LAYOUT))
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    return gl.load(out_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :], mask=inside, other=0.0)


@gluon.jit
def _send(y, out_desc, staging, row, column, LAYOUT: gl.constexpr):
    """Round a part of the tile and send it out through `staging`."""
    staging.store(gl.convert_layout(y.to(out_desc.dtype), LAYOUT))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], staging)


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, out_desc, out_ptr, stagings, helds, M, num_m, num_n, num_k,
    N: gl.constexpr, WHICH: gl.constexpr, GROUPS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """One warp group: its part of each tile's rows, from the first product to the store."""
    STAGES: gl.constexpr = w_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    # Three groups have too few registers for one instruction over 256 columns.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N if GROUPS == 2 else HALF, 16])
    HALF_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    staging = stagings.index(WHICH)
    held = helds.index(WHICH)
    count = 0
    phase = 0
    for tile in range(gl.program_id(0), num_m * num_n, NUM_PROGRAMS):
        tile_m, tile_n = _tile_of(tile, num_m, num_n, GROUP_M)
        row = (tile_m * GROUPS + WHICH) * ROWS
        column = tile_n * BLOCK_N
        if EPILOGUE == _ADD:
            # The residual comes while the products run: its left half to the staging memory, its right to registers,
            # of which three groups have too few: there it comes later.
            tma.store_wait(0)
            mbarrier.expect(held, ROWS * HALF * 2)
            tma.async_copy_global_to_shared(out_desc, [row, column], held, staging)
            if GROUPS == 2:
                residual = _right_residual(out_ptr, row, column + HALF, M, N, ROWS, HALF_LAYOUT)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
        for k in range(num_k):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            x = x_ring.index(stage * GROUPS + WHICH)
            acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), acc, is_async=True)
            # The product before this one has ended: its stage is free.
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=k > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        if EPILOGUE == _GATE:
            gate, up = gl.split(gl.reshape(acc, (ROWS, HALF, 2)))
            y = gate / (1.0 + gl.exp(-gate)) * up
            tma.store_wait(0)
            _send(y, out_desc, staging, row, column // 2, HALF_LAYOUT)
        else:
            left, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, HALF)), (0, 2, 1)))
            left = gl.convert_layout(left, HALF_LAYOUT)
            right = gl.convert_layout(right, HALF_LAYOUT)
            if EPILOGUE == _ADD:
                mbarrier.wait(held, phase)
                phase ^= 1
                left += staging.load(HALF_LAYOUT).to(gl.float32)
            else:
                tma.store_wait(0)
            _send(left, out_desc, staging, row, column, HALF_LAYOUT)
            if EPILOGUE == _ADD:
                if GROUPS == 3:
                    residual = _right_residual(out_ptr, row, column + HALF, M, N, ROWS, HALF_LAYOUT)
                right += residual.to(gl.float32)
            tma.store_wait(0)
            _send(right, out_desc, staging, row, column + HALF, HALF_LAYOUT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def hopper_kernel(
    x_desc, w_desc, out_desc, out_ptr, rows_ptr, M, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr, EPILOGUE: gl.constexpr,
    HAS_ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor walks over output tiles; TMA clips what lies outside.

    A tile's rows are divided among GROUPS warp groups, each with what `x_desc` holds.
    """
    if HAS_ROWS:  # how many there are in truth
        M = gl.minimum(M, gl.load(rows_ptr))
    ROWS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    num_m = gl.cdiv(M, GROUPS * ROWS)
    num_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_k: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * GROUPS, ROWS, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, ROWS, BLOCK_N // 2], out_desc.layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=GROUPS)
        mbarrier.init(full.index(stage), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(held.index(group), count=1)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    two: gl.constexpr = 2
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
        )
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (x_ring, w_ring, free, full, out_desc, out_ptr, staging, held, M, num_m, num_n, num_k,
                     N, zero, GROUPS, GROUP_M, NUM_PROGRAMS, EPILOGUE),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, out_desc, out_ptr, staging, held, M, num_m, num_n, num_k,
                     N, one, GROUPS, GROUP_M, NUM_PROGRAMS, EPILOGUE),
                ),
                (
                    _load,
                    (x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, num_k, GROUPS, GROUP_M, NUM_PROGRAMS),
                ),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (x_ring, w_ring, free, full, out_desc, out_ptr, staging, held, M, num_m, num_n, num_k,
                     N, zero, GROUPS, GROUP_M, NUM_PROGRAMS, EPILOGUE),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, out_desc, out_ptr, staging, held, M, num_m, num_n, num_k,
                     N, one, GROUPS, GROUP_M, NUM_PROGRAMS, EPILOGUE),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, out_desc, out_ptr, staging, held, M, num_m, num_n, num_k,
                     N, two, GROUPS, GROUP_M, NUM_PROGRAMS, EPILOGUE),
                ),
                (
                    _load,
                    (x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, num_k, GROUPS, GROUP_M, NUM_PROGRAMS),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
