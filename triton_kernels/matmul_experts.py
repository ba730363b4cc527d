"""Products of tokens with their experts' weights: each pair of a token and an expert is a row, each expert a matrix.

Rows are gathered where they lie and tiles follow each other expert by expert (`expert_work.py`), so an expert's weights
are read once for all its tokens of a tile. K in plain order: a row's bits depend on nothing but the row and the expert.

Shape suffixes: M rows of x, E experts, K reduced size, N output size, P pairs, F intermediate size, 2F gate and up rows
in turns.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import has_little_shared_memory, use_kernels
from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.matmul_epilogue import gate_pairs
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference
from tercet.triton_kernels.tiles import cdiv


@triton.jit
def _experts_kernel(
    x_ptr, w_ptr, pairs_ptr, tile_experts_ptr, out_ptr, PER_ROW: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of pairs * ceil(N / BLOCK_N),): one program owns one output tile of one expert, if there is one."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // num_n
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        start_n = tl.program_id(0) % num_n * BLOCK_N
        pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        rows = tl.maximum(pairs, 0) // PER_ROW
        w_rows = tl.minimum(start_n + tl.arange(0, BLOCK_N), N - 1)
        columns = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
        w_ptrs = w_ptr + expert.to(tl.int64) * N * K + w_rows[None, :] * K + columns[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if K % BLOCK_K:
                x = tl.load(x_ptrs + k, mask=(columns < K - k)[None, :], other=0.0)
                w = tl.load(w_ptrs + k, mask=(columns < K - k)[:, None], other=0.0)
            else:
                x = tl.load(x_ptrs + k)
                w = tl.load(w_ptrs + k)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        width: tl.constexpr = N // 2 if GATE else N
        if GATE:
            y = gate_pairs(acc, BLOCK_M, BLOCK_N)
            out_columns = start_n // 2 + tl.arange(0, BLOCK_N // 2)
        else:
            y = acc
            out_columns = start_n + tl.arange(0, BLOCK_N)
        pointers = out_ptr + pairs.to(tl.int64)[:, None] * width + out_columns[None, :]
        mask = (pairs >= 0)[:, None] & (out_columns < width)[None, :]
        tl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class _Blocks:
    """The sizes of one program's work. Its rows are a tile of pairs."""

    n: int
    k: int
    warps: int
    stages: int


def expert_tile(num_pairs: int, num_experts: int) -> int:
    """Places of a tile that suit so many pairs: twice what an expert has on average, within what is fast.

    Few experts have just the average: of tiles that hold no more, half of them would need two, and read weights twice.
    """
    return next(tile for tile in (16, 32, 64, 128) if tile * num_experts >= 2 * num_pairs or tile == 128)


def matmul_experts_silu_and_mul(x_MK: Tensor, w_E2FK: Tensor, work: ExpertWork, pairs_each: int) -> Tensor:
    """silu(gate) * up of each pair's row with its expert's weights: [M, K] x [E, 2F, K] -> [M * pairs_each, F].

    Pair p is of row p // `pairs_each`. Pairs that are in no tile stay unwritten. fp32 inside; graph-safe.
    """
    if w_E2FK.ndim == 3 and w_E2FK.shape[1] % 2:
        raise ValueError(f"w: got {w_E2FK.shape[1]} rows, wanted gate and up rows in turns: an even number")
    _check(x_MK, w_E2FK, work)
    out_PF = x_MK.new_empty(x_MK.shape[0] * pairs_each, w_E2FK.shape[1] // 2)
    if use_kernels(x_MK):
        _launch(x_MK, w_E2FK, work, out_PF, pairs_each, gate=True)
    else:
        for expert, pairs in _by_expert(work):
            y = F.linear(x_MK[pairs // pairs_each], w_E2FK[expert])
            out_PF[pairs] = silu_and_mul_reference(y[:, 0::2], y[:, 1::2])
    return out_PF


def matmul_experts(x_PK: Tensor, w_ENK: Tensor, work: ExpertWork) -> Tensor:
    """Each pair's own row with its expert's weights: [P, K] x [E, N, K] -> [P, N]. As above."""
    _check(x_PK, w_ENK, work)
    out_PN = x_PK.new_empty(x_PK.shape[0], w_ENK.shape[1])
    if use_kernels(x_PK):
        _launch(x_PK, w_ENK, work, out_PN, 1, gate=False)
    else:
        for expert, pairs in _by_expert(work):
            out_PN[pairs] = F.linear(x_PK[pairs], w_ENK[expert])
    return out_PN


def _by_expert(work: ExpertWork) -> list[tuple[int, Tensor]]:
    """Experts that have pairs, with these: for the references."""
    pairs_NQ = work.pairs_Q.view(-1, work.tile)
    experts = work.experts_N.unique().tolist()
    found = ((expert, pairs_NQ[work.experts_N == expert].flatten()) for expert in experts if expert >= 0)
    return [(expert, pairs[pairs >= 0].long()) for expert, pairs in found]


def _launch(x_MK: Tensor, w_ENK: Tensor, work: ExpertWork, out: Tensor, per_row: int, *, gate: bool) -> None:
    _, N, K = w_ENK.shape
    num_tiles = len(work.experts_N)
    if not num_tiles:
        return
    blocks = _blocks(work.tile, x_MK)
    precision = "ieee" if x_MK.dtype == torch.float32 else "tf32"
    _experts_kernel[(num_tiles * cdiv(N, blocks.n),)](
        x_MK, w_ENK, work.pairs_Q, work.experts_N, out, PER_ROW=per_row, N=N, K=K, BLOCK_M=work.tile, BLOCK_N=blocks.n,
        BLOCK_K=blocks.k, GATE=gate, PRECISION=precision, num_warps=blocks.warps, num_stages=blocks.stages,
        **overlap_options(x_MK),
    )  # fmt: skip


def _blocks(tile: int, x: Tensor) -> _Blocks:
    """Few rows are about bytes on their way, many about what is multiplied for each byte."""
    if x.dtype == torch.float32:
        return _Blocks(n=32, k=32, warps=4, stages=2)
    if has_little_shared_memory(x.device):
        return _Blocks(n=64, k=64, warps=4, stages=3)
    if tile <= 32:
        return _Blocks(n=128, k=128, warps=4, stages=3)
    return _Blocks(n=256, k=64, warps=8, stages=3 if tile == 64 else 4)


def _check(x_MK: Tensor, w_ENK: Tensor, work: ExpertWork) -> None:
    check_dtype("x", x_MK, *FLOATS)
    check_shape("x", x_MK, None, None)
    check_same("x", x_MK, x_MK)
    check_shape("w", w_ENK, work.num_experts, None, x_MK.shape[1])
    check_same("w", w_ENK, x_MK)
