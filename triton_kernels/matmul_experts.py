"""Products of tokens with their experts' weights: each pair of a token and an expert is a row, each expert a matrix.

Rows are gathered where they lie and tiles follow each other expert by expert (`expert_work.py`), so an expert's weights
are read once for all its tokens of a tile. K in plain order: a row's bits depend on nothing but the row and the expert.
Not so where each pair is by itself, in a tile of one place.

Shape suffixes: M rows of x, E experts, K reduced size, N output size, P pairs, F intermediate size, 2F gate and up rows
in turns.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_same, check_shape
from tercet.triton_kernels.choose_scaled import can_be_vector
from tercet.triton_kernels.clamped_gate import ClampedGate, clamped_gate_reference
from tercet.triton_kernels.dispatch import is_hopper, multiprocessors, use_kernels
from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.experts_blocks import Blocks, blocks_of, scaled_blocks_of, warps_of_vector
from tercet.triton_kernels.experts_fp8 import can_round, launch_experts_fp8
from tercet.triton_kernels.experts_groups import GROUPS_WIDTH, experts_groups_kernel
from tercet.triton_kernels.experts_hopper import experts_hopper_kernel
from tercet.triton_kernels.experts_placed import launch_placed
from tercet.triton_kernels.experts_tile import experts_kernel, scaled_experts_kernel
from tercet.triton_kernels.experts_vector import experts_vector_kernel, experts_vector_scaled_kernel
from tercet.triton_kernels.gelu_and_mul import gelu_and_mul_reference
from tercet.triton_kernels.matmul_epilogue import CLAMPED, GATE, GELU, SQUARED, STORE
from tercet.triton_kernels.matmul_launch import can_use_tma
from tercet.triton_kernels.overlap import overlap_options
from tercet.triton_kernels.relu_squared import relu_squared, relu_squared_reference
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight, check_weight
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference
from tercet.triton_kernels.tiles import cdiv, hopper_descriptor, hopper_layout
from tercet.triton_kernels.widen import plain

_TILES = ((16, 12), (32, 32), (64, 128))
"""Where weights are widened on Hopper: places of a tile, and the most pairs of an expert, on average, that it is for.
Of the experts of Qwen3-30B-A3B, Mixtral-8x7B, DeepSeek-V3 on eight ranks and gpt-oss-20b, on H200s (docs/tried.md)."""
_LEAST_OF_GROUPS = 64
"""Places, of a tile that is not a single program's."""
_RING_BYTES = 224 * 1024
"""Of the kernel of warp groups, for its stages."""
_MOST_WIDENED = 192
"""Pairs of an expert, on average, beyond which it costs less to expand weights once than to widen them for each tile,
other than by warp groups."""
_MOST_ALONE_OF_FP8, _MOST_ALONE_OF_FOUR, _MOST_ALONE_OF_MX = 64, 32, 8
"""Pairs by themselves: numbers of fewer bits take more instructions there, and more pairs more than tiles do."""
_ROWS_OF_VECTOR = 8
"""Of weights of eight bits or four, for a pair that is alone."""
_MANY = 512
"""Pairs of an expert, on average, from which on warps that only load are ahead."""


def expert_tile(
    num_pairs: int, num_experts: int, *weights: Weight, deterministic: bool = False, again: int = 0
) -> int:  # fmt: skip
    """Places of a tile that suit so many pairs: twice what an expert has on average, within what is fast.

    One: each pair is better by itself, which deterministic mode has not. `weights`: of all products, the first one's
    ahead. `again`: so many pairs have an expert that others have, too, whoever is chosen.

    Few experts have just the average: of tiles that hold no more, half of them would need two, and read weights twice.
    That costs warp groups less than what empty places do: they widen and multiply for these, too.
    """
    if not deterministic and _are_alone(num_pairs, num_experts, weights, again):
        return 1
    w_ENK = weights[0]
    if isinstance(w_ENK, ScaledWeight) and w_ENK.dtype.itemsize == 2 and is_hopper(w_ENK.device):
        return next((tile for tile, most in _TILES if num_pairs <= most * num_experts), 128)
    return next(tile for tile in (16, 32, 64, 128) if tile * num_experts >= 2 * num_pairs or tile == 128)


def _are_alone(num_pairs: int, num_experts: int, weights: Sequence[Weight], again: int) -> bool:
    """Whether pairs are so few for so many experts that hardly two have the same.

    Two of one expert read its weights twice. That costs less where they are of eight bits or four: tiles of few pairs
    wait for other things, too.
    """
    for_each = 4 if any(isinstance(w_ENK, Tensor) for w_ENK in weights) else 2
    few = for_each * num_pairs <= num_experts and 2 * for_each * again <= num_pairs
    return few and all(
        isinstance(w_ENK, Tensor) or (can_be_vector(w_ENK) and num_pairs <= _most_alone(w_ENK)) for w_ENK in weights
    )


def _most_alone(w_ENK: ScaledWeight) -> float:
    if w_ENK.is_mx:
        return _MOST_ALONE_OF_MX
    if not is_hopper(w_ENK.device):
        return math.inf
    return _MOST_ALONE_OF_FOUR if w_ENK.four_bits else _MOST_ALONE_OF_FP8


def matmul_experts_gated(
    x_MK: Tensor, w_E2FK: Weight, work: ExpertWork, pairs_each: int, clamp: ClampedGate | None = None, *,
    gelu: bool = False,
) -> Tensor:  # fmt: skip
    """The first product of each pair's row with its expert's weights, and its gate: [M, K] x [E, 2F, K] ->
    [M * pairs_each, F]. silu(gate) * up, or as `clamp` says, or with `gelu`, approximated by tanh, in place of silu.

    Pair p is of row p // `pairs_each`. Pairs that are in no tile stay unwritten. fp32 inside; graph-safe. Of eight bits
    or four weights are [E * 2F, K].
    """
    N = _check(x_MK, w_E2FK, work)
    if N % 2:
        raise ValueError(f"w: got {N} rows, wanted gate and up rows in turns: an even number")
    if clamp is not None:
        check_shape("bias", clamp.bias_E2F, work.num_experts, N)
        check_same("bias", clamp.bias_E2F, x_MK)
    out_PF = x_MK.new_empty(x_MK.shape[0] * pairs_each, N // 2)
    if use_kernels(x_MK):
        _launch(x_MK, w_E2FK, work, out_PF, pairs_each, GELU if gelu else GATE if clamp is None else CLAMPED, clamp)
    else:
        w_E2FK = _plain(w_E2FK, work)
        for expert, pairs in _by_expert(work):
            y = F.linear(x_MK[pairs // pairs_each], w_E2FK[expert])
            if clamp is None:
                gate = gelu_and_mul_reference if gelu else silu_and_mul_reference
                out_PF[pairs] = gate(y[:, 0::2], y[:, 1::2])
            else:
                out_PF[pairs] = clamped_gate_reference(y, clamp.bias_E2F[expert], clamp.limit, clamp.slope)
    return out_PF


def matmul_experts(x_PK: Tensor, w_ENK: Weight, work: ExpertWork, *, squared_each: int = 0) -> Tensor:
    """The second product, of each pair's own row: [P, K] x [E, N, K] -> [P, N]. As above. What ran ahead of it knew the
    pairs' experts. `squared_each`: not 0, it is the first one, of experts without gates: ReLU, squared, and pair p is
    of row p // `squared_each`."""
    N = _check(x_PK, w_ENK, work)
    each = squared_each or 1
    out_PN = x_PK.new_empty(x_PK.shape[0] * each, N)
    if use_kernels(x_PK):
        ends_squared = squared_each and isinstance(w_ENK, Tensor)  # only products of plain numbers can
        _launch(x_PK, w_ENK, work, out_PN, each, SQUARED if ends_squared else STORE, None)
        if squared_each and not ends_squared:
            out_PN = relu_squared(out_PN)
    else:
        w_ENK = _plain(w_ENK, work)
        for expert, pairs in _by_expert(work):
            y = F.linear(x_PK[pairs // each], w_ENK[expert])
            out_PN[pairs] = relu_squared_reference(y) if squared_each else y
    return out_PN


def _plain(w_ENK: Weight, work: ExpertWork) -> Tensor:
    return w_ENK if isinstance(w_ENK, Tensor) else plain(w_ENK).unflatten(0, (work.num_experts, -1))


def _by_expert(work: ExpertWork) -> list[tuple[int, Tensor]]:
    """Experts that have pairs, with these: for the references."""
    pairs_Q = torch.arange(len(work.experts_N)) if work.pairs_Q is None else work.pairs_Q
    pairs_NQ = pairs_Q.view(-1, work.tile)
    experts = work.experts_N.unique().tolist()
    there = (expert for expert in experts if 0 <= expert < work.num_experts)
    found = ((expert, pairs_NQ[work.experts_N == expert].flatten()) for expert in there)
    return [(expert, pairs[pairs >= 0].long()) for expert, pairs in found]


def _launch(
    x_MK: Tensor, w_ENK: Weight, work: ExpertWork, out: Tensor, per_row: int, epilogue: tl.constexpr,
    clamp: ClampedGate | None,
) -> None:  # fmt: skip
    N = math.prod(w_ENK.shape[:-1]) // work.num_experts
    K = w_ENK.stored_columns if isinstance(w_ENK, ScaledWeight) else w_ENK.shape[-1]
    num_tiles, pairs_each = len(work.experts_N), len(out) // work.num_experts
    if not num_tiles:
        return
    bias, limit, slope = clamp or (x_MK, 0.0, 0.0)
    fixed = {
        "bias_ptr": bias, "limit": float(limit), "slope": float(slope), "out_ptr": out, "PER_ROW": per_row, "N": N,
        "K": K, "EPILOGUE": epilogue.value, **overlap_options(x_MK),
    }  # fmt: skip
    if work.pairs_Q is None:
        _launch_vectors(x_MK, w_ENK, work, fixed)
        return
    fixed["BLOCK_M"] = work.tile
    if isinstance(w_ENK, ScaledWeight):
        if can_round(w_ENK, work, len(out)) and can_use_tma(x_MK, w_ENK.numbers_NJ):
            launch_experts_fp8(x_MK, w_ENK, work, fixed)
            return
        if x_MK.dtype.itemsize == 2 and can_use_tma(x_MK, w_ENK.numbers_NJ):
            launch = _launch_groups if work.tile >= _LEAST_OF_GROUPS else launch_placed
            launch(x_MK, w_ENK, work, fixed)
            return
        if x_MK.dtype.itemsize == 2 and pairs_each <= _MOST_WIDENED:
            _launch_scaled(x_MK, w_ENK, work, fixed)
            return
        w_ENK = plain(w_ENK).contiguous()
        fixed["K"] = K = x_MK.shape[1]
    w_RK = w_ENK.view(-1, K)
    if work.tile == 128 and pairs_each >= _MANY and K % 64 == 0 and can_use_tma(x_MK, w_RK):
        experts_hopper_kernel[(min(multiprocessors(x_MK.device), num_tiles * cdiv(N, 256)),)](
            x_MK, hopper_descriptor(w_RK, 256, 64), work.pairs_Q, work.experts_N, x_scales_ptr=x_MK, w_scales_ptr=x_MK,
            num_tiles=num_tiles, STAGES=4, SCALED=False, X_LAYOUT=(layout := hopper_layout(x_MK.dtype, work.tile, 64)),
            OUT_LAYOUT=layout, num_warps=4, **fixed,
        )  # fmt: skip
        return
    blocks = blocks_of(work.tile, x_MK)
    precision = "ieee" if x_MK.dtype == torch.float32 else "tf32"
    experts_kernel[(num_tiles * cdiv(N, blocks.n),)](
        x_MK, w_RK, work.pairs_Q, work.experts_N, BLOCK_N=blocks.n, BLOCK_K=blocks.k, PRECISION=precision,
        num_warps=blocks.warps, num_stages=blocks.stages, **fixed,
    )  # fmt: skip


def _launch_vectors(x_MK: Tensor, w_ENK: Weight, work: ExpertWork, fixed: dict[str, Any]) -> None:
    N, K = fixed["N"], fixed["K"]
    fixed["ROWS"] = N * work.num_experts
    if isinstance(w_ENK, Tensor):
        blocks = Blocks(n=4, k=1024, warps=2, stages=1) if K >= 1024 else Blocks(n=8, k=256, warps=1, stages=1)
        experts_vector_kernel[(len(work.experts_N) * cdiv(N, blocks.n),)](
            x_MK, w_ENK, work.experts_N, BLOCK_N=blocks.n, BLOCK_K=blocks.k, num_warps=blocks.warps, **fixed
        )
        return
    words = w_ENK.numbers_NJ.view(torch.int32)
    experts_vector_scaled_kernel[(len(work.experts_N) * cdiv(N, _ROWS_OF_VECTOR),)](
        x_MK, words, w_ENK.scales_GN, work.experts_N, GROUP=w_ENK.group, FOUR=w_ENK.kind, X=x_MK.shape[1],
        BLOCK_N=_ROWS_OF_VECTOR, num_warps=warps_of_vector(words.shape[1]), **fixed,
    )  # fmt: skip


def _launch_scaled(x_MK: Tensor, w_RK: ScaledWeight, work: ExpertWork, fixed: dict[str, Any]) -> None:
    blocks = scaled_blocks_of(work.tile, w_RK)
    together = 1 if is_hopper(x_MK.device) else 4 if w_RK.four_bits and not w_RK.is_mx else 2
    scaled_experts_kernel[(len(work.experts_N) * cdiv(fixed["N"], blocks.n),)](
        x_MK, w_RK.numbers_NJ.view(torch.int32) if w_RK.is_mx else w_RK.numbers_NJ, w_RK.scales_GN, work.pairs_Q,
        work.experts_N, X=x_MK.shape[1], ROWS=len(w_RK), GROUP=w_RK.group, FOUR=w_RK.kind, TOGETHER=together,
        BLOCK_N=blocks.n, BLOCK_K=blocks.k, num_warps=blocks.warps, num_stages=blocks.stages, **fixed,
    )  # fmt: skip


def _launch_groups(x_MK: Tensor, w_RK: ScaledWeight, work: ExpertWork, fixed: dict[str, Any]) -> None:
    each = 2 if w_RK.four_bits else 1  # numbers in a byte
    block_k = w_RK.widest_of_one_scale
    stage_bytes = 2 * block_k * work.tile + GROUPS_WIDTH * block_k // each
    num_tiles = len(work.experts_N)
    experts_groups_kernel[(min(multiprocessors(x_MK.device), num_tiles * cdiv(fixed["N"], GROUPS_WIDTH)),)](
        x_MK, hopper_descriptor(w_RK.numbers_NJ, 64, block_k // each), w_RK.scales_GN, work.pairs_Q, work.experts_N,
        num_tiles=num_tiles, ROWS=len(w_RK), GROUP=w_RK.group, FOUR=w_RK.kind, X=x_MK.shape[1],
        STAGES=min(_RING_BYTES // stage_bytes, 8), X_LAYOUT=hopper_layout(x_MK.dtype, work.tile, block_k),
        num_warps=4, **fixed,
    )  # fmt: skip


def _check(x_MK: Tensor, w_ENK: Weight, work: ExpertWork) -> int:
    """N."""
    check_dtype("x", x_MK, *FLOATS)
    check_shape("x", x_MK, None, None)
    check_same("x", x_MK, x_MK)
    if isinstance(w_ENK, Tensor):
        check_shape("w", w_ENK, work.num_experts, None, x_MK.shape[1])
        check_same("w", w_ENK, x_MK)
        return w_ENK.shape[1]
    check_weight("w", w_ENK, x_MK, None, x_MK.shape[1], of_experts=True)
    N, left = divmod(len(w_ENK), work.num_experts)
    if left:
        raise ValueError(f"w: got {len(w_ENK)} rows, wanted as many for each of {work.num_experts} experts")
    return N
