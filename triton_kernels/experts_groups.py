"""Products of many tokens with their experts' weights of eight bits or four on Hopper: warps that only load, which
gather rows where they lie, and three warp groups that widen and multiply (`widening_groups.py`), in Gluon.

Shape suffixes: M rows of x, K reduced size, N output columns of one expert.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.gather_rows import gather_stages, make_gathered_ring
from tercet.triton_kernels.matmul_epilogue import CLAMPED
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.widening_groups import OWN, multiply_stages, own_rows, store_sums

_GROUPS = gl.constexpr(3)
GROUPS_WIDTH = _GROUPS.value * OWN.value
"""Output columns of a tile."""


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr, num_tiles,
    N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, FOUR: gl.constexpr,
    EPILOGUE: gl.constexpr, PDL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warp group: its 64 output columns of each tile, from the first product to the store."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    num_n: gl.constexpr = (N + _GROUPS * OWN - 1) // (_GROUPS * OWN)
    wait_for_previous(PDL)
    count = 0
    for index in range(gl.program_id(0), num_tiles * num_n, gl.num_programs(0)):
        tile = index // num_n
        expert = gl.load(tile_experts_ptr + tile)
        if expert >= 0:
            start_n = (index % num_n * _GROUPS + WHICH) * OWN
            scale_ptrs = scales_ptr + expert * N + gl.minimum(start_n + own_rows(w_ring), N - 1)
            acc, _, count = multiply_stages(
                x_ring, None, w_ring, free, full, count, scale_ptrs, 0, K, ROWS, GROUP, FOUR, False, WHICH
            )
            of_expert = bias_ptr + expert.to(gl.int64) * N
            store_sums(
                acc, of_expert, limit, slope, pairs_ptr, out_ptr, start_n, tile * BLOCK_M, 0, N, EPILOGUE,
                EPILOGUE == CLAMPED, True,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["num_tiles"])
def experts_groups_kernel(
    x_ptr, w_desc, scales_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr, num_tiles,
    PER_ROW: gl.constexpr, N: gl.constexpr, K: gl.constexpr, X: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr,
    FOUR: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, X_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): one program a multiprocessor walks over output tiles, of BLOCK_M places by three times 64
    columns, those of an expert that are there.

    ROWS: of all experts' weights. GROUP columns share a scale; what `w_desc` has in a block divides it, or 64 with
    FOUR, where halves have their own. It divides K, too, of which x has the first X columns.
    """
    BLOCK_K: gl.constexpr = w_desc.block_shape[1] * (2 if FOUR else 1)
    x_ring, w_ring, free, full = make_gathered_ring(x_ptr, w_desc, X_LAYOUT, BLOCK_M, BLOCK_K, STAGES, _GROUPS, _GROUPS)
    let_next_start(PDL)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    two: gl.constexpr = 2
    gl.warp_specialize(
        [
            (
                _multiply,
                (x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr,
                 num_tiles, N, K, ROWS, GROUP, FOUR, EPILOGUE, PDL, zero),
            ),
            (
                _multiply,
                (x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr,
                 num_tiles, N, K, ROWS, GROUP, FOUR, EPILOGUE, PDL, one),
            ),
            (
                _multiply,
                (x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr,
                 num_tiles, N, K, ROWS, GROUP, FOUR, EPILOGUE, PDL, two),
            ),
            (
                gather_stages,
                (x_ptr, w_desc, pairs_ptr, tile_experts_ptr, x_ring, w_ring, free, full, num_tiles, PER_ROW, N, K, X,
                 FOUR, PDL),
            ),
        ],
        [4, 4, 4],
        [152, 152, 56],
    )  # fmt: skip
