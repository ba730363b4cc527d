"""Products of few tokens with their experts' weights of eight bits or four, a program to each output tile, on Hopper.
K in plain order.

These tiles wait for their own instructions, and then for bytes (docs/tried.md). So the copy engine brings all they
need: rows of x, too, which are put into the order of places first.

Shape suffixes: Q places of all tiles, M places of a tile, K reduced size, N output columns of one expert.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.experts_tile import store_tile
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.scaled_weight import BYTES, ScaledWeight
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.widen import awaited, load_wide

_WIDTH = 128
"""Output columns of a tile."""


@triton.jit
def _place_kernel(
    x_ptr, pairs_ptr, tile_experts_ptr, out_ptr, PER_ROW: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (Q,): one program copies the row of the pair in a place, if there is one."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0)
    if tl.load(tile_experts_ptr + place // TILE) >= 0:
        pair = tl.load(pairs_ptr + place)
        if pair >= 0:
            columns = tl.arange(0, BLOCK_K)
            row = tl.load(x_ptr + (pair // PER_ROW).to(tl.int64) * K + columns, mask=columns < K)
            tl.store(out_ptr + place.to(tl.int64) * K + columns, row, mask=columns < K)


def _place_rows(x_MK: Tensor, work: ExpertWork, per_row: int) -> Tensor:
    """Each place's row, [Q, K]: pair p's is p // `per_row`. Places of nobody stay unwritten."""
    assert work.pairs_Q is not None
    K = x_MK.shape[1]
    out_QK = x_MK.new_empty(len(work.pairs_Q), K)
    _place_kernel[(len(out_QK),)](
        x_MK, work.pairs_Q, work.experts_N, out_QK, PER_ROW=per_row, TILE=work.tile, K=K, BLOCK_K=next_power_of_2(K),
        num_warps=4, **overlap_options(x_MK),
    )  # fmt: skip
    return out_QK


@triton.jit
def placed_experts_kernel(
    x_desc, w_desc, scales_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr, N: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of pairs * ceil(N / BLOCK_N),): one program owns one output tile of one expert, if there is one.
    `x_desc`: rows in their places. `w_desc`: bytes of all experts' ROWS, or words of MXFP4. K columns are whole blocks,
    of which x may not have the last: those are zeros."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // num_n
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        start_n = tl.program_id(0) % num_n * BLOCK_N
        pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        # Of the next expert's weights, or of none, nothing is stored.
        first = expert * N + start_n
        scale_ptrs = scales_ptr + expert * N + tl.minimum(start_n + tl.arange(0, BLOCK_N), N - 1)
        acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([tile * BLOCK_M, k])
            numbers = w_desc.load([first, k // BLOCK_K * w_desc.block_shape[1]])
            wide = load_wide(numbers, scale_ptrs, k, ROWS, GROUP, FOUR, BLOCK_K, x.dtype, 1)
            acc_NM = awaited(tl.dot(wide, x.T, acc_NM))
        acc = tl.trans(acc_NM)
        store_tile(acc, pairs, expert, start_n, bias_ptr, limit, slope, out_ptr, N, BLOCK_M, BLOCK_N, EPILOGUE)


def launch_placed(x_MK: Tensor, w_RK: ScaledWeight, work: ExpertWork, fixed: dict[str, Any]) -> None:
    """`fixed`: what the kernel is given whatever the weights are, and PER_ROW."""
    x_QK = _place_rows(x_MK, work, fixed.pop("PER_ROW"))
    numbers = w_RK.numbers_NJ.view(torch.int32) if w_RK.is_mx else w_RK.numbers_NJ
    block_k = min(w_RK.widest, 2 * BYTES)
    each = w_RK.stored_columns // numbers.shape[1]  # columns
    placed_experts_kernel[(len(work.experts_N) * cdiv(fixed["N"], _WIDTH),)](
        TensorDescriptor.from_tensor(x_QK, [work.tile, block_k]),
        TensorDescriptor.from_tensor(numbers, [_WIDTH, block_k // each]), w_RK.scales_GN, work.pairs_Q, work.experts_N,
        ROWS=len(w_RK), GROUP=w_RK.group, FOUR=w_RK.kind, BLOCK_N=_WIDTH, BLOCK_K=block_k, num_warps=4,
        num_stages=4 if w_RK.is_mx else 3, **fixed,
    )  # fmt: skip
