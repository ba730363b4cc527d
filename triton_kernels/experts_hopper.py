"""Products of many tokens with their experts' weights on Hopper: warps that only load, which gather rows where they
lie (`gather_rows.py`), and two warp groups that only multiply, in Gluon. K in plain order.

Shape suffixes: M places of a tile, K reduced size, N output columns of one expert.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.clamped_gate import gate_columns, load_own
from tercet.triton_kernels.gather_rows import gather_stages, make_gathered_ring
from tercet.triton_kernels.matmul_epilogue import CLAMPED, SQUARED, is_gate
from tercet.triton_kernels.matmul_hopper import multiply_stages, sums_layout
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous


@gluon.constexpr_function
def out_layout(columns):
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def send(y, staging, out_ptr, pairs, column, WIDTH: gl.constexpr):
    """Round a part of the tile and send it out through `staging`, whole rows by neighbouring threads."""
    COLUMNS: gl.constexpr = y.shape[1]
    LAYOUT: gl.constexpr = out_layout(COLUMNS)
    staging.store(y.to(staging.dtype))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    places = out_ptr + pairs.to(gl.int64)[:, None] * WIDTH + columns[None, :]
    gl.store(places, staging.load(LAYOUT), mask=(pairs >= 0)[:, None] & (columns < WIDTH)[None, :])


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, staging, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, limit,
    slope, out_ptr, num_tiles, PER_ROW: gl.constexpr, N: gl.constexpr, K: gl.constexpr, EPILOGUE: gl.constexpr,
    SCALED: gl.constexpr, PDL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warp group: half of each tile's places, from the first product to the store."""
    ROWS: gl.constexpr = x_ring.shape[1] // 2
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    num_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_k: gl.constexpr = (K + x_ring.shape[2] - 1) // x_ring.shape[2]
    wait_for_previous(PDL)
    places = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, out_layout(HALF)))
    ACC: gl.constexpr = sums_layout(BLOCK_N, x_ring.dtype.primitive_bitwidth)
    own_places = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    count = 0
    for index in range(gl.program_id(0), num_tiles * num_n, gl.num_programs(0)):
        tile = index // num_n
        expert = gl.load(tile_experts_ptr + tile)
        if expert >= 0:
            column = index % num_n * BLOCK_N
            pairs = gl.load(pairs_ptr + tile * x_ring.shape[1] + places)
            if EPILOGUE == CLAMPED:
                own = load_own(bias_ptr, expert, column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC)), N)
            acc, count = multiply_stages(x_ring, w_ring, free, full, count, num_k, WHICH)
            if SCALED:
                rows = gl.maximum(gl.load(pairs_ptr + tile * x_ring.shape[1] + own_places), 0) // PER_ROW
                columns = gl.minimum(column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC)), N - 1)
                acc = acc * gl.load(x_scales_ptr + rows)[:, None]
                acc = acc * gl.load(w_scales_ptr + expert * N + columns)[None, :]
            if EPILOGUE == CLAMPED:
                acc += own.to(gl.float32)[None, :]
            if EPILOGUE == SQUARED:
                acc = gl.maximum(acc, 0.0)
                acc *= acc
            if is_gate(EPILOGUE):
                y = gate_columns(acc, limit, slope, ROWS, BLOCK_N, EPILOGUE)
                send(y, staging, out_ptr, pairs, column // 2, N // 2)
            else:
                left, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, HALF)), (0, 2, 1)))
                send(left, staging, out_ptr, pairs, column, N)
                send(right, staging, out_ptr, pairs, column + HALF, N)


@gluon.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["num_tiles"])
def experts_hopper_kernel(
    x_ptr, w_desc, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, limit, slope, out_ptr, num_tiles,
    PER_ROW: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    EPILOGUE: gl.constexpr, SCALED: gl.constexpr, X_LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): one program a multiprocessor walks over output tiles, of BLOCK_M places by as many columns as
    `w_desc` has rows in a block, those of an expert that are there.

    SCALED: x and weights are in FP8, a scale beside each row of either.
    """
    BLOCK_K: gl.constexpr = w_desc.block_shape[1]
    x_ring, w_ring, free, full = make_gathered_ring(x_ptr, w_desc, X_LAYOUT, BLOCK_M, BLOCK_K, STAGES, 1, 2)
    shape: gl.constexpr = [BLOCK_M // 2, w_desc.block_shape[0] // 2]
    staging0 = gl.allocate_shared_memory(out_ptr.dtype.element_ty, shape, OUT_LAYOUT)
    staging1 = gl.allocate_shared_memory(out_ptr.dtype.element_ty, shape, OUT_LAYOUT)
    let_next_start(PDL)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    four_bits: gl.constexpr = False
    gl.warp_specialize(
        [
            (
                _multiply,
                (x_ring, w_ring, free, full, staging0, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr,
                 bias_ptr, limit, slope, out_ptr, num_tiles, PER_ROW, N, K, EPILOGUE, SCALED, PDL, zero),
            ),
            (
                _multiply,
                (x_ring, w_ring, free, full, staging1, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr,
                 bias_ptr, limit, slope, out_ptr, num_tiles, PER_ROW, N, K, EPILOGUE, SCALED, PDL, one),
            ),
            (
                gather_stages,
                (x_ptr, w_desc, pairs_ptr, tile_experts_ptr, x_ring, w_ring, free, full, num_tiles, PER_ROW, N, K, K,
                 four_bits, PDL),
            ),
        ],
        [4, 4],
        [216, 80],
    )  # fmt: skip
