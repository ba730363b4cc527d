"""Products of many tokens with their experts' weights where both have eight bits, on Hopper: warps that only load,
which gather rows where they lie (`gather_rows.py`), and two warp groups that only multiply, in Gluon.

Scales are of groups of 128 columns, as in `matmul_fp8.py`; where each row has one, `experts_hopper.py` does it.

Shape suffixes: M places of a tile, K reduced size, N output columns of one expert.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.clamped_gate import gate_columns
from tercet.triton_kernels.dispatch import multiprocessors
from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.experts_hopper import experts_hopper_kernel, out_layout, send
from tercet.triton_kernels.gather_rows import gather_stages, make_gathered_ring
from tercet.triton_kernels.matmul_epilogue import is_gate
from tercet.triton_kernels.matmul_fp8 import OWN, SIZE, add_scaled, begin, end, stage_scales
from tercet.triton_kernels.matmul_hopper import sums_layout
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.round_rows import LONGEST, round_rows, round_whole_rows
from tercet.triton_kernels.scaled_weight import TILE, ScaledWeight
from tercet.triton_kernels.tiles import cdiv, hopper_descriptor, hopper_layout

PLACES = 128
"""Of a tile."""
_FEWEST = 128
"""Pairs of an expert, on average, from which rounding their rows pays."""


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, staging, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr, out_ptr, num_tiles,
    PER_ROW: gl.constexpr, N: gl.constexpr, K: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """One warp group: half of each tile's places, in the ring from ROW on, from the first product to the store."""
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    SUMS: gl.constexpr = sums_layout(BLOCK_N, 8)
    WIDTH: gl.constexpr = BLOCK_N // 2 if is_gate(EPILOGUE) else BLOCK_N
    OUT: gl.constexpr = out_layout(WIDTH)
    num_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_k: gl.constexpr = K // SIZE
    wait_for_previous(PDL)
    never = num_tiles < 0  # which the compiler does not know: so sums stay in one place
    count = 0
    for index in range(gl.program_id(0), num_tiles * num_n, gl.num_programs(0)):
        tile = index // num_n
        expert = gl.load(tile_experts_ptr + tile)
        if expert >= 0:
            column = index % num_n * BLOCK_N
            of_tile = pairs_ptr + tile * x_ring.shape[1] + ROW
            rows = gl.maximum(gl.load(of_tile + gl.arange(0, OWN, gl.SliceLayout(1, SUMS))), 0) // PER_ROW
            x_ptrs = x_scales_ptr + rows.to(gl.int64) * num_k
            w_ptr = w_scales_ptr + (expert * N + column) // SIZE * (2 * num_k)
            acc = gl.zeros((OWN, BLOCK_N), gl.float32, SUMS)
            part = gl.zeros((OWN, BLOCK_N), gl.float32, SUMS)
            for k in range(num_k):
                of_rows, even, odd = stage_scales(x_ptrs, w_ptr, k)
                part = end(begin(x_ring, w_ring, full, count, part, never, ROW, 0), free, count)
                acc = add_scaled(acc, part, of_rows, even, odd)
                count += 1
            pairs = gl.load(of_tile + gl.arange(0, OWN, gl.SliceLayout(1, OUT)))
            if is_gate(EPILOGUE):
                y = gate_columns(acc, 0.0, 0.0, OWN, BLOCK_N, EPILOGUE)
                send(y, staging, out_ptr, pairs, column // 2, N // 2)
            else:
                send(acc, staging, out_ptr, pairs, column, N)


@gluon.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["num_tiles"])
def experts_fp8_kernel(
    x_ptr, w_desc, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr, out_ptr, num_tiles, PER_ROW: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr,
    X_LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): one program a multiprocessor walks over output tiles, of BLOCK_M places by as many columns as
    `w_desc` has rows in a block, those of an expert that are there."""
    x_ring, w_ring, free, full = make_gathered_ring(x_ptr, w_desc, X_LAYOUT, BLOCK_M, SIZE, STAGES, 1, 2)
    shape: gl.constexpr = [OWN, w_desc.block_shape[0] // 2 if is_gate(EPILOGUE) else w_desc.block_shape[0]]
    staging0 = gl.allocate_shared_memory(out_ptr.dtype.element_ty, shape, OUT_LAYOUT)
    staging1 = gl.allocate_shared_memory(out_ptr.dtype.element_ty, shape, OUT_LAYOUT)
    let_next_start(PDL)
    zero: gl.constexpr = 0
    second: gl.constexpr = OWN
    four_bits: gl.constexpr = False
    gl.warp_specialize(
        [
            (
                _multiply,
                (x_ring, w_ring, free, full, staging0, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr, out_ptr,
                 num_tiles, PER_ROW, N, K, EPILOGUE, PDL, zero),
            ),
            (
                _multiply,
                (x_ring, w_ring, free, full, staging1, pairs_ptr, tile_experts_ptr, x_scales_ptr, w_scales_ptr, out_ptr,
                 num_tiles, PER_ROW, N, K, EPILOGUE, PDL, second),
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


def can_round(w_RK: ScaledWeight, work: ExpertWork, num_pairs: int) -> bool:
    """Whether rows of so many pairs are to be rounded."""
    many = work.tile == PLACES and num_pairs >= _FEWEST * work.num_experts
    scales = w_RK.tile_scales
    return many and scales is not None and (scales.ndim > 1 or w_RK.shape[1] <= LONGEST)


def launch_experts_fp8(x_MK: Tensor, w_RK: ScaledWeight, work: ExpertWork, fixed: dict[str, Any]) -> None:
    """Round rows and multiply. `fixed`: the arguments that all kernels of experts have."""
    num_tiles, out, tile_scales = len(work.experts_N), fixed["out_ptr"], w_RK.tile_scales
    assert tile_scales is not None
    of_rows = tile_scales.ndim == 1
    numbers_MK, scales = round_whole_rows(x_MK) if of_rows else round_rows(x_MK)
    width = 256 if of_rows else TILE
    options = {
        "num_tiles": num_tiles, "X_LAYOUT": hopper_layout(numbers_MK.dtype, PLACES, TILE),
        "OUT_LAYOUT": hopper_layout(out.dtype, PLACES, 64), "num_warps": 4, **fixed,
    }  # fmt: skip
    where = numbers_MK, hopper_descriptor(w_RK.numbers_NJ, width, TILE), work.pairs_Q, work.experts_N
    programs = min(multiprocessors(x_MK.device), num_tiles * cdiv(fixed["N"], width))
    if of_rows:
        experts_hopper_kernel[(programs,)](
            *where, x_scales_ptr=scales, w_scales_ptr=tile_scales, STAGES=4, SCALED=True, **options
        )
        return
    for name in ("bias_ptr", "limit", "slope"):  # of gates within limits, whose weights are in MXFP4 or plain
        options.pop(name)
    experts_fp8_kernel[(programs,)](*where, x_scales_ptr=scales, w_scales_ptr=tile_scales, STAGES=5, **options)
