"""Products of rows and weights that both have eight bits, on Hopper: a warp that only loads, and two or three warp
groups that only multiply, in Gluon.

The matrix units take FP8 twice as fast as 16 bits. What they make of 128 columns is multiplied by the scales of those,
of the row (`round_rows.py`) and of the weights (`tile_scales` in scaled_weight.py), and added in fp32, from left to
right. Two groups' sums are added while their next products run; with three there are registers for one product each.

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
from tercet.triton_kernels.matmul_hopper import sums_layout, tile_of
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.ring import make_barriers

SIZE = gl.constexpr(128)
"""Columns of a stage, which share a scale of a row; and rows of weights that share two."""
OWN = gl.constexpr(64)
"""Rows of a warp group."""


@gluon.jit
def _load(
    x_desc, tail_desc, w_desc, x_ring, tail_ring, w_ring, free, full, num_m, num_n, num_k: gl.constexpr,
    TALL: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill the ring, stage after stage, tile after tile."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    HEIGHT: gl.constexpr = BLOCK_M * 3 // 2 if TALL else BLOCK_M
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, num_m, num_n, GROUP_M)
        for k in range(num_k):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (HEIGHT + BLOCK_N) * SIZE)
            tma.async_copy_global_to_shared(w_desc, [tile_n * BLOCK_N, k * SIZE], bar, w_ring.index(stage))
            tma.async_copy_global_to_shared(x_desc, [tile_m * HEIGHT, k * SIZE], bar, x_ring.index(stage))
            if TALL:
                place = [tile_m * HEIGHT + BLOCK_M, k * SIZE]
                tma.async_copy_global_to_shared(tail_desc, place, bar, tail_ring.index(stage))
            count += 1


@gluon.jit
def begin(x_ring, w_ring, full, count, into, keep, ROW: gl.constexpr, COLUMN: gl.constexpr):
    """Begin to multiply a stage's rows, when they are there; in the registers of `into`, which it does not `keep`."""
    STAGES: gl.constexpr = x_ring.shape[0]
    stage = count % STAGES
    mbarrier.wait(full.index(stage), count // STAGES & 1)
    x = x_ring.index(stage).slice(ROW, OWN)
    w = w_ring.index(stage).slice(COLUMN, into.shape[1]).permute((1, 0))
    return warpgroup_mma(x, w, into, use_acc=keep, is_async=True)


@gluon.jit
def end(part, free, count):
    """What `begin` began; its stage is free."""
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(free.index(count % free.shape[0]))
    return part


@gluon.jit
def stage_scales(x_ptrs, w_ptr, k):
    """Of a stage: those of rows, and of even and of odd columns."""
    return gl.load(x_ptrs + k), gl.load(w_ptr + 2 * k), gl.load(w_ptr + 2 * k + 1)


@gluon.jit
def add_scaled(acc, part, of_rows, even, odd):
    """acc + part, times the scales of its rows and columns."""
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return acc + part * (of_rows[:, None] * gl.where(columns % 2 == 0, even, odd)[None, :])


@gluon.jit
def _send(acc, out_desc, staging, row, column, EPILOGUE: gl.constexpr):
    """Gate what is in turns, round, and send it out."""
    if EPILOGUE == GATE:
        y = gl.convert_layout(gate_pairs(acc, OWN, acc.shape[1]), sums_layout(acc.shape[1] // 2))
        column = column // 2
    else:
        y = acc
    staging.store(y.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], staging)


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, staging, held, M, num_m, num_n,
    num_k: gl.constexpr, N: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr,
    EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, AHEAD: gl.constexpr, ROW: gl.constexpr, START: gl.constexpr,
    COLUMN: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 rows of each tile from START on, in the ring from ROW on; WIDTH columns from COLUMN on."""
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    SUMS: gl.constexpr = sums_layout(WIDTH, 8)
    never = M < 0  # which the compiler does not know: so sums stay in one place
    count = 0
    phase = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, num_m, num_n, GROUP_M)
        row = tile_m * HEIGHT + START
        column = tile_n * BLOCK_N + COLUMN
        if EPILOGUE == ADD:  # the residual comes while the products run
            tma.store_wait(0)
            mbarrier.expect(held, OWN * WIDTH * 2)
            tma.async_copy_global_to_shared(out_desc, [row, column], held, staging)
        rows = row + gl.arange(0, OWN, gl.SliceLayout(1, SUMS))
        x_ptrs = x_scales_ptr + gl.minimum(rows, M - 1).to(gl.int64) * num_k
        w_ptr = w_scales_ptr + gl.minimum(column, N - 1) // SIZE * (2 * num_k)
        acc = gl.zeros((OWN, WIDTH), gl.float32, SUMS)
        part = gl.zeros((OWN, WIDTH), gl.float32, SUMS)
        if AHEAD:
            zeros = gl.zeros((OWN, WIDTH), gl.float32, SUMS)
            of_rows, even, odd = stage_scales(x_ptrs, w_ptr, 0)
            part = end(begin(x_ring, w_ring, full, count, zeros, False, ROW, COLUMN), free, count)
            count += 1
            for k in range(1, num_k):
                next_rows, next_even, next_odd = stage_scales(x_ptrs, w_ptr, k)
                begun = begin(x_ring, w_ring, full, count, zeros, False, ROW, COLUMN)
                acc = add_scaled(acc, part, of_rows, even, odd)
                part = end(begun, free, count)
                of_rows = next_rows
                even = next_even
                odd = next_odd
                count += 1
            acc = add_scaled(acc, part, of_rows, even, odd)
        else:
            for k in range(num_k):
                of_rows, even, odd = stage_scales(x_ptrs, w_ptr, k)
                part = end(begin(x_ring, w_ring, full, count, part, never, ROW, COLUMN), free, count)
                acc = add_scaled(acc, part, of_rows, even, odd)
                count += 1
        columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
        if HAS_BIAS:
            acc += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        if EPILOGUE == ADD:
            mbarrier.wait(held, phase)
            phase ^= 1
            acc += staging.load(SUMS).to(gl.float32)
        else:
            tma.store_wait(0)
        _send(acc, out_desc, staging, row, column, EPILOGUE)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def fp8_kernel(
    x_desc, tail_desc, w_desc, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc, rows_ptr, M, N: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, TALL: gl.constexpr,
    EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): one program a multiprocessor walks over output tiles; TMA clips what lies outside. A TALL tile
    has half as many rows again, of `tail_desc`, for a third warp group; one of 64 rows is divided by columns."""
    rows = M
    if HAS_ROWS:  # how many there are in truth
        rows = gl.minimum(M, gl.load(rows_ptr))
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    HEIGHT: gl.constexpr = BLOCK_M * 3 // 2 if TALL else BLOCK_M
    WIDTH: gl.constexpr = BLOCK_N // 2 if BLOCK_M == OWN else BLOCK_N
    AHEAD: gl.constexpr = not TALL
    num_m = gl.cdiv(rows, HEIGHT)
    num_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_k: gl.constexpr = K // SIZE
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, SIZE], x_desc.layout)
    tail_ring = x_ring
    if TALL:
        tail_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M // 2, SIZE], tail_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, SIZE], w_desc.layout)
    free, full = make_barriers(STAGES, 3 if TALL else 2, 1)
    held = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(3):
        mbarrier.init(held.index(group), count=1)
    staging0 = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    staging1 = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    zero: gl.constexpr = 0
    second_row: gl.constexpr = 0 if BLOCK_M == OWN else OWN
    second_column: gl.constexpr = WIDTH if BLOCK_M == OWN else 0
    third_row: gl.constexpr = 2 * OWN
    let_next_start(PDL)
    wait_for_previous(PDL)
    if TALL:
        staging2 = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_shape, out_desc.layout)
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc,
                     staging0, held.index(0), M, num_m, num_n, num_k, N, HEIGHT, WIDTH, GROUP_M,
                     EPILOGUE, HAS_BIAS, AHEAD, zero, zero, zero),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc,
                     staging1, held.index(1), M, num_m, num_n, num_k, N, HEIGHT, WIDTH, GROUP_M,
                     EPILOGUE, HAS_BIAS, AHEAD, second_row, second_row, zero),
                ),
                (
                    _multiply,
                    (tail_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc,
                     staging2, held.index(2), M, num_m, num_n, num_k, N, HEIGHT, WIDTH, GROUP_M,
                     EPILOGUE, HAS_BIAS, AHEAD, zero, third_row, zero),
                ),
                (
                    _load,
                    (x_desc, tail_desc, w_desc, x_ring, tail_ring, w_ring, free, full, num_m, num_n, num_k, TALL,
                     GROUP_M),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc,
                     staging0, held.index(0), M, num_m, num_n, num_k, N, HEIGHT, WIDTH, GROUP_M,
                     EPILOGUE, HAS_BIAS, AHEAD, zero, zero, zero),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, x_scales_ptr, w_scales_ptr, bias_ptr, out_desc,
                     staging1, held.index(1), M, num_m, num_n, num_k, N, HEIGHT, WIDTH, GROUP_M,
                     EPILOGUE, HAS_BIAS, AHEAD, second_row, second_row, second_column),
                ),
                (
                    _load,
                    (x_desc, tail_desc, w_desc, x_ring, tail_ring, w_ring, free, full, num_m, num_n, num_k, TALL,
                     GROUP_M),
                ),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip
