"""Products of tokens with their experts' weights: each pair of a token and an expert is a row, each expert a matrix.

Rows are gathered where they lie and tiles follow each other expert by expert (`expert_work.py`), so an expert's weights
are read once for all its tokens of a tile. K in plain order: a row's bits depend on nothing but the row and the expert.

Shape suffixes: M rows of x, E experts, K reduced size, N output size, P pairs, F intermediate size, 2F gate and up rows
in turns.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import has_little_shared_memory, is_hopper, multiprocessors, use_kernels
from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.experts_groups import experts_groups_kernel
from tercet.triton_kernels.matmul_epilogue import gate_pairs
from tercet.triton_kernels.matmul_launch import can_use_tma
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight, check_weight
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference
from tercet.triton_kernels.tiles import cdiv, hopper_descriptor
from tercet.triton_kernels.widen import awaited, dealt_columns, load_wide, plain

_FEW = 16
"""Pairs of a tile that waits for weights alone."""
_RING_BYTES = 224 * 1024
"""Of the kernel of warp groups, for its stages."""
_MOST_PAIRS = 192
"""Of an expert, on average, beyond which it costs less to expand weights once than to widen them for each tile. On an
H100, with the experts of Qwen3-30B-A3B in FP8, 128 pairs take 1.05 ms by tiles, where plain weights take 0.59 and those
of 512 pairs 1.3; to expand takes some 0.6."""


@triton.jit
def _store_tile(
    acc, pairs, start_n, out_ptr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr
):
    width: tl.constexpr = N // 2 if GATE else N
    if GATE:
        y = gate_pairs(acc, BLOCK_M, BLOCK_N)
        columns = start_n // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        y = acc
        columns = start_n + tl.arange(0, BLOCK_N)
    pointers = out_ptr + pairs.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=(pairs >= 0)[:, None] & (columns < width)[None, :])


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
        _store_tile(acc, pairs, start_n, out_ptr, N, BLOCK_M, BLOCK_N, GATE)


@triton.jit
def _scaled_experts_kernel(
    x_ptr, w_ptr, scales_ptr, pairs_ptr, tile_experts_ptr, out_ptr, PER_ROW: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same with weights of eight bits or four, which are the tall side (`matmul_scaled.py`). ROWS: of all experts'
    weights. BLOCK_K divides K."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    each: tl.constexpr = 2 if FOUR else 1  # numbers in a byte
    tile = tl.program_id(0) // num_n
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        start_n = tl.program_id(0) % num_n * BLOCK_N
        pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        rows = tl.maximum(pairs, 0) // PER_ROW
        w_rows = expert * N + tl.minimum(start_n + tl.arange(0, BLOCK_N), N - 1)
        x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * K + dealt_columns(BLOCK_K, TOGETHER)[:, None]
        w_ptrs = w_ptr + w_rows.to(tl.int64)[:, None] * (K // each) + tl.arange(0, BLOCK_K // each)[None, :]
        scale_ptrs = scales_ptr + w_rows
        acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k // each)
            wide = load_wide(w, scale_ptrs, k, ROWS, GROUP, FOUR, BLOCK_K, x.dtype, TOGETHER)
            acc_NM = awaited(tl.dot(wide, x, acc_NM))
        acc = tl.trans(acc_NM)
        _store_tile(acc, pairs, start_n, out_ptr, N, BLOCK_M, BLOCK_N, GATE)


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


def matmul_experts_silu_and_mul(x_MK: Tensor, w_E2FK: Weight, work: ExpertWork, pairs_each: int) -> Tensor:
    """silu(gate) * up of each pair's row with its expert's weights: [M, K] x [E, 2F, K] -> [M * pairs_each, F].

    Pair p is of row p // `pairs_each`. Pairs that are in no tile stay unwritten. fp32 inside; graph-safe. Of eight bits
    or four weights are [E * 2F, K].
    """
    N = _check(x_MK, w_E2FK, work)
    if N % 2:
        raise ValueError(f"w: got {N} rows, wanted gate and up rows in turns: an even number")
    out_PF = x_MK.new_empty(x_MK.shape[0] * pairs_each, N // 2)
    if use_kernels(x_MK):
        _launch(x_MK, w_E2FK, work, out_PF, pairs_each, gate=True)
    else:
        w_E2FK = _plain(w_E2FK, work)
        for expert, pairs in _by_expert(work):
            y = F.linear(x_MK[pairs // pairs_each], w_E2FK[expert])
            out_PF[pairs] = silu_and_mul_reference(y[:, 0::2], y[:, 1::2])
    return out_PF


def matmul_experts(x_PK: Tensor, w_ENK: Weight, work: ExpertWork) -> Tensor:
    """Each pair's own row with its expert's weights: [P, K] x [E, N, K] -> [P, N]. As above."""
    N = _check(x_PK, w_ENK, work)
    out_PN = x_PK.new_empty(x_PK.shape[0], N)
    if use_kernels(x_PK):
        _launch(x_PK, w_ENK, work, out_PN, 1, gate=False)
    else:
        w_ENK = _plain(w_ENK, work)
        for expert, pairs in _by_expert(work):
            out_PN[pairs] = F.linear(x_PK[pairs], w_ENK[expert])
    return out_PN


def _plain(w_ENK: Weight, work: ExpertWork) -> Tensor:
    return plain(w_ENK).view(work.num_experts, -1, w_ENK.shape[-1])


def _by_expert(work: ExpertWork) -> list[tuple[int, Tensor]]:
    """Experts that have pairs, with these: for the references."""
    pairs_NQ = work.pairs_Q.view(-1, work.tile)
    experts = work.experts_N.unique().tolist()
    found = ((expert, pairs_NQ[work.experts_N == expert].flatten()) for expert in experts if expert >= 0)
    return [(expert, pairs[pairs >= 0].long()) for expert, pairs in found]


def _launch(x_MK: Tensor, w_ENK: Weight, work: ExpertWork, out: Tensor, per_row: int, *, gate: bool) -> None:
    N, K = math.prod(w_ENK.shape[:-1]) // work.num_experts, x_MK.shape[1]
    num_tiles = len(work.experts_N)
    if not num_tiles:
        return
    if isinstance(w_ENK, ScaledWeight):
        if x_MK.dtype.itemsize == 2 and len(out) <= _MOST_PAIRS * work.num_experts:
            _launch_scaled(x_MK, w_ENK, work, out, per_row, N, gate=gate)
            return
        w_ENK = plain(w_ENK)
    blocks = _blocks(work.tile, x_MK)
    precision = "ieee" if x_MK.dtype == torch.float32 else "tf32"
    _experts_kernel[(num_tiles * cdiv(N, blocks.n),)](
        x_MK, w_ENK, work.pairs_Q, work.experts_N, out, PER_ROW=per_row, N=N, K=K, BLOCK_M=work.tile, BLOCK_N=blocks.n,
        BLOCK_K=blocks.k, GATE=gate, PRECISION=precision, num_warps=blocks.warps, num_stages=blocks.stages,
        **overlap_options(x_MK),
    )  # fmt: skip


def _launch_scaled(
    x_MK: Tensor, w_RK: ScaledWeight, work: ExpertWork, out: Tensor, per_row: int, N: int, *, gate: bool
) -> None:
    if block_k := _block_of_groups(x_MK, w_RK, work.tile):
        _launch_groups(x_MK, w_RK, work, out, per_row, N, block_k, gate=gate)
        return
    blocks = _scaled_blocks(work.tile, w_RK)
    together = 1 if is_hopper(x_MK.device) else 4 if w_RK.four_bits else 2
    _scaled_experts_kernel[(len(work.experts_N) * cdiv(N, blocks.n),)](
        x_MK, w_RK.numbers_NJ, w_RK.scales_GN, work.pairs_Q, work.experts_N, out, PER_ROW=per_row, N=N, K=x_MK.shape[1],
        ROWS=len(w_RK), GROUP=w_RK.group, FOUR=w_RK.kind, TOGETHER=together, BLOCK_M=work.tile, BLOCK_N=blocks.n,
        BLOCK_K=blocks.k, GATE=gate, num_warps=blocks.warps, num_stages=blocks.stages, **overlap_options(x_MK),
    )  # fmt: skip


def _launch_groups(
    x_MK: Tensor, w_RK: ScaledWeight, work: ExpertWork, out: Tensor, per_row: int, N: int, block_k: int, *, gate: bool
) -> None:
    each = 2 if w_RK.four_bits else 1  # numbers in a byte
    num_tiles = len(work.experts_N)
    stage = 2 * block_k * work.tile + 192 * block_k // each
    rows = hopper_descriptor(x_MK, work.tile, block_k).layout
    num_programs = min(multiprocessors(x_MK.device), num_tiles * cdiv(N, 192))
    experts_groups_kernel[(num_programs,)](
        x_MK, hopper_descriptor(w_RK.numbers_NJ, 64, block_k // each), w_RK.scales_GN, work.pairs_Q, work.experts_N, out,
        num_tiles, PER_ROW=per_row, N=N, K=x_MK.shape[1], ROWS=len(w_RK), GROUP=w_RK.group, FOUR=w_RK.kind,
        BLOCK_M=work.tile, STAGES=min(_RING_BYTES // stage, 8), NUM_PROGRAMS=num_programs, GATED=gate, X_LAYOUT=rows,
        num_warps=4, **overlap_options(x_MK),
    )  # fmt: skip


def _block_of_groups(x_MK: Tensor, w_RK: ScaledWeight, tile: int) -> int | None:
    """Columns of a block of the kernel of warp groups, which is for many rows; None where it cannot be used."""
    if tile < 64 or not can_use_tma(x_MK, w_RK.numbers_NJ):
        return None
    if w_RK.four_bits:
        return 128
    return 128 if w_RK.group % 128 == 0 and w_RK.shape[1] % 128 == 0 else 64


def _scaled_blocks(tile: int, w_RK: ScaledWeight) -> _Blocks:
    """Fewer bytes a column leave room for more of them."""
    columns, stages = 128, 3 if has_little_shared_memory(w_RK.device) or tile == 128 else 4
    if is_hopper(w_RK.device) and (w_RK.four_bits or tile <= _FEW):
        columns, stages = 256, 4 if w_RK.four_bits and tile <= _FEW else 3
    return _Blocks(n=64, k=min(w_RK.widest, columns), warps=4, stages=stages)


def _blocks(tile: int, x: Tensor) -> _Blocks:
    """Few rows are about bytes on their way, many about what is multiplied for each byte."""
    if x.dtype == torch.float32:
        return _Blocks(n=32, k=32, warps=4, stages=2)
    if has_little_shared_memory(x.device):
        return _Blocks(n=64, k=64, warps=4, stages=3)
    if tile <= 32:
        return _Blocks(n=128, k=128, warps=4, stages=3)
    return _Blocks(n=256, k=64, warps=8, stages=3 if tile == 64 else 4)


def _check(x_MK: Tensor, w_ENK: Weight, work: ExpertWork) -> int:
    """N."""
    check_dtype("x", x_MK, *FLOATS)
    check_shape("x", x_MK, None, None)
    check_same("x", x_MK, x_MK)
    if isinstance(w_ENK, Tensor):
        check_shape("w", w_ENK, work.num_experts, None, x_MK.shape[1])
        check_same("w", w_ENK, x_MK)
        return w_ENK.shape[1]
    check_weight("w", w_ENK, x_MK, None, x_MK.shape[1])
    N, left = divmod(len(w_ENK), work.num_experts)
    if left:
        raise ValueError(f"w: got {len(w_ENK)} rows, wanted as many for each of {work.num_experts} experts")
    return N
