"""Products of many rows with weights of eight bits or four on Hopper: a warp that only loads, and two or three warp
groups that widen and multiply (`widening_groups.py`), in Gluon.

Shape suffixes: M rows, K reduced size, N output columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tercet.triton_kernels.matmul_hopper import tile_of
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.ring import fetch_weights, make_barriers
from tercet.triton_kernels.widening_groups import OWN, multiply_stages, own_rows, store_sums


@gluon.jit
def _load(
    x_desc, tail_desc, w_desc, x_ring, tail_ring, w_ring, free, full, num_m, num_n, K: gl.constexpr,
    FOUR: gl.constexpr, PARTS: gl.constexpr, GROUP_M: gl.constexpr, TALL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill the ring, stage after stage, tile after tile; with the first weights ahead of the wait."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    WIDTH: gl.constexpr = w_ring.shape[0] // STAGES * OWN
    HEIGHT: gl.constexpr = BLOCK_M * 3 // 2 if TALL else BLOCK_M
    BYTES: gl.constexpr = HEIGHT * BLOCK_K * 2 + WIDTH * w_ring.shape[2]
    PART_K: gl.constexpr = K // PARTS
    ahead: gl.constexpr = STAGES if PART_K // BLOCK_K > STAGES else PART_K // BLOCK_K
    num_tiles = num_m * num_n * PARTS
    if gl.program_id(0) < num_tiles:
        _, tile_n = tile_of(gl.program_id(0), num_m, num_n * PARTS, GROUP_M)
        for stage in gl.static_range(ahead):
            k = tile_n % PARTS * PART_K + stage * BLOCK_K
            fetch_weights(w_desc, w_ring, full, stage, tile_n // PARTS * WIDTH, k, BYTES, FOUR)
    wait_for_previous(PDL)
    count = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, num_m, num_n * PARTS, GROUP_M)
        start_k = tile_n % PARTS * PART_K
        for k in range(start_k, start_k + PART_K, BLOCK_K):
            stage = count % STAGES
            if count >= ahead:
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                fetch_weights(w_desc, w_ring, full, stage, tile_n // PARTS * WIDTH, k, BYTES, FOUR)
            bar = full.index(stage)
            tma.async_copy_global_to_shared(x_desc, [tile_m * HEIGHT, k], bar, x_ring.index(stage))
            if TALL:
                tma.async_copy_global_to_shared(tail_desc, [tile_m * HEIGHT + BLOCK_M, k], bar, tail_ring.index(stage))
            count += 1


@gluon.jit
def _multiply(
    x_ring, tail_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N: gl.constexpr,
    K: gl.constexpr, GROUP: gl.constexpr, FOUR: gl.constexpr, PARTS: gl.constexpr, GROUP_M: gl.constexpr,
    EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, TALL: gl.constexpr, PDL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warp group: its 64 output columns of each tile, from the first product to the store."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    HEIGHT: gl.constexpr = BLOCK_M * 3 // 2 if TALL else BLOCK_M
    GROUPS: gl.constexpr = w_ring.shape[0] // x_ring.shape[0]
    PART_K: gl.constexpr = K // PARTS
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n * PARTS, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, num_m, num_n * PARTS, GROUP_M)
        start_n = (tile_n // PARTS * GROUPS + WHICH) * OWN
        start_m = tile_m * HEIGHT
        part = tile_n % PARTS
        scale_ptrs = scales_ptr + gl.minimum(start_n + own_rows(w_ring), N - 1)
        acc, tail, count = multiply_stages(
            x_ring, tail_ring, w_ring, free, full, count, scale_ptrs, part * PART_K, PART_K, N, GROUP, FOUR, TALL, WHICH
        )
        wait_for_previous(PDL)
        of_part = out_ptr + part.to(gl.int64) * M * N if PARTS > 1 else out_ptr
        store_sums(acc, bias_ptr, None, None, None, of_part, start_n, start_m, M, N, EPILOGUE, HAS_BIAS, False)
        if TALL:
            store_sums(
                tail, bias_ptr, None, None, None, of_part, start_n, start_m + BLOCK_M, M, N, EPILOGUE, HAS_BIAS, False
            )


@gluon.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def groups_kernel(
    x_desc, tail_desc, w_desc, scales_ptr, bias_ptr, out_ptr, rows_ptr, M, N: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, FOUR: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    GROUP_M: gl.constexpr, TALL: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): one program a multiprocessor walks over output tiles of GROUPS times 64 columns, with PARTS
    over sums of parts of K, in an output of each part's own. A TALL tile has half as many rows again, of `tail_desc`.

    GROUP columns share a scale; what `w_desc` has in a block divides it, or 64 with FOUR, where halves have their own.
    """
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    rows = M
    if HAS_ROWS:  # how many there are in truth
        rows = gl.minimum(M, gl.load(rows_ptr))
    num_m = gl.cdiv(rows, BLOCK_M * 3 // 2 if TALL else BLOCK_M)
    num_n: gl.constexpr = (N + GROUPS * OWN - 1) // (GROUPS * OWN)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    tail_ring = x_ring
    if TALL:
        tail_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M // 2, BLOCK_K], tail_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUPS, OWN, w_desc.block_shape[1]], w_desc.layout)
    free, full = make_barriers(STAGES, GROUPS, 1)
    let_next_start(PDL)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    two: gl.constexpr = 2
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (x_ring, tail_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP,
                     FOUR, PARTS, GROUP_M, EPILOGUE, HAS_BIAS, TALL, PDL, zero),
                ),
                (
                    _multiply,
                    (x_ring, tail_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP,
                     FOUR, PARTS, GROUP_M, EPILOGUE, HAS_BIAS, TALL, PDL, one),
                ),
                (
                    _load,
                    (x_desc, tail_desc, w_desc, x_ring, tail_ring, w_ring, free, full, num_m, num_n, K, FOUR, PARTS,
                     GROUP_M, TALL, PDL),
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
                    (x_ring, tail_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP,
                     FOUR, PARTS, GROUP_M, EPILOGUE, HAS_BIAS, TALL, PDL, zero),
                ),
                (
                    _multiply,
                    (x_ring, tail_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP,
                     FOUR, PARTS, GROUP_M, EPILOGUE, HAS_BIAS, TALL, PDL, one),
                ),
                (
                    _multiply,
                    (x_ring, tail_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP,
                     FOUR, PARTS, GROUP_M, EPILOGUE, HAS_BIAS, TALL, PDL, two),
                ),
                (
                    _load,
                    (x_desc, tail_desc, w_desc, x_ring, tail_ring, w_ring, free, full, num_m, num_n, K, FOUR, PARTS,
                     GROUP_M, TALL, PDL),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
