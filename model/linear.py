"""Products with weights: the Triton kernels, or on the CPU oneDNN with weights reordered once, when they are loaded.

On two Zen 5 cores the reordered products of a 135M model in fp32 take 10 ms for one row and 18 ms for 16; those of
`torch.nn.functional.linear` take 34 ms and 66 ms.

A product's matrix may have adapters: what they make of each row's numbers is added to what the matrix makes of them.

`deterministic` asks the kernels for a row's bits not to depend on M; in fp32 those of oneDNN never do. `rows`: how many
rows there are in truth, on the device; kernels may leave out those behind.

Shape suffixes: M rows (tokens), K reduced size, N output size, F gated size.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.low_rank import LowRank, add_low_rank
from tercet.triton_kernels.matmul import (
    matmul,
    matmul_add,
    matmul_silu_and_mul,
    rms_norm_matmul,
    rms_norm_matmul_silu_and_mul,
)
from tercet.triton_kernels.scaled_weight import Weight
from tercet.triton_kernels.silu_and_mul import silu_and_mul_in_turns


@dataclass(frozen=True)
class ReorderedPairs:
    """A `LowRank` for the CPU, each adapter's matrices reordered: so a row's bits do not depend on M there either."""

    downs: tuple[Tensor, ...]
    ups: tuple[Tensor, ...]


Pairs = LowRank | ReorderedPairs


@dataclass(frozen=True)
class Adapted:
    """A matrix in a step of which some rows have adapters."""

    weight_NK: Weight
    pairs: Pairs
    adapters_M: Tensor
    """Of each row; -1: none."""

    def __len__(self) -> int:
        return len(self.weight_NK)


Matrix = Weight | Adapted


def reorder_for_cpu(weight_NK: Tensor) -> Tensor:
    """The weight as these functions like it best on its device: an opaque oneDNN tensor on the CPU, else itself."""
    if use_kernels(weight_NK) or not torch._C._has_mkldnn:
        return weight_NK
    fits = weight_NK.dtype == torch.float32 or (
        weight_NK.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK) if fits else weight_NK


def reorder_pairs(low_rank: LowRank) -> Pairs:
    """The same for low ranks."""
    downs, ups = (tuple(map(reorder_for_cpu, matrices)) for matrices in (low_rank.down_ARK, low_rank.up_ANR))
    return ReorderedPairs(downs, ups) if is_reordered(downs[0]) else low_rank


def is_reordered(weight_NK: Matrix) -> TypeGuard[Tensor]:
    return isinstance(weight_NK, Tensor) and weight_NK.is_mkldnn


def linear(
    x_MK: Tensor,
    weight_NK: Matrix,
    bias_N: Tensor | None,
    out: Tensor | None = None,
    *,
    deterministic: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """x W^T (+ bias): [M, K] x [N, K] -> [M, N], written to `out` if given."""
    if isinstance(weight_NK, Adapted):
        out = linear(x_MK, weight_NK.weight_NK, bias_N, out, deterministic=deterministic, rows=rows)
        _add_adapted(out, x_MK, weight_NK, deterministic=deterministic)
        return out
    if is_reordered(weight_NK):
        y_MN = _onednn(x_MK, weight_NK, bias_N)
        return y_MN if out is None else out.copy_(y_MN)
    return matmul(x_MK, weight_NK, bias_N, out, deterministic=deterministic, rows=rows)


def rms_norm_linear(
    x_MK: Tensor,
    norm_K: Tensor,
    eps: float,
    weight_NK: Matrix,
    bias_N: Tensor | None,
    *,
    deterministic: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """`linear` of the normed rows of x."""
    if isinstance(weight_NK, Adapted):
        normed_MK = rms_norm(x_MK, norm_K, eps, rows, deterministic=deterministic)
        return linear(normed_MK, weight_NK, bias_N, deterministic=deterministic, rows=rows)
    if is_reordered(weight_NK):
        return _onednn(rms_norm(x_MK, norm_K, eps), weight_NK, bias_N)
    return rms_norm_matmul(x_MK, norm_K, eps, weight_NK, bias_N, deterministic=deterministic, rows=rows)


def linear_add(
    x_MK: Tensor, weight_NK: Matrix, residual_MN: Tensor, *, deterministic: bool, rows: Tensor | None = None
) -> None:
    """residual += x W^T, in place."""
    if isinstance(weight_NK, Adapted):
        linear_add(x_MK, weight_NK.weight_NK, residual_MN, deterministic=deterministic, rows=rows)
        _add_adapted(residual_MN, x_MK, weight_NK, deterministic=deterministic)
    elif is_reordered(weight_NK):
        residual_MN.add_(_onednn(x_MK, weight_NK, None))
    else:
        matmul_add(x_MK, weight_NK, residual_MN, deterministic=deterministic, rows=rows)


def linear_gate(
    x_MK: Tensor, weight_2FK: Matrix, out: Tensor | None = None, *, deterministic: bool, rows: Tensor | None = None
) -> Tensor:
    """silu(gate) * up of x W^T, whose rows are gate and up in turns: [M, F]."""
    if isinstance(weight_2FK, Adapted):
        assert out is None  # steps with adapters are not cut
        return silu_and_mul_in_turns(linear(x_MK, weight_2FK, None, deterministic=deterministic, rows=rows))
    return matmul_silu_and_mul(x_MK, weight_2FK, out, deterministic=deterministic, rows=rows)


def rms_norm_linear_gate(
    x_MK: Tensor, norm_K: Tensor, eps: float, weight_2FK: Matrix, *, deterministic: bool, rows: Tensor | None = None
) -> Tensor:
    """`linear_gate` of the normed rows of x."""
    if isinstance(weight_2FK, Adapted):
        normed_MK = rms_norm(x_MK, norm_K, eps, rows, deterministic=deterministic)
        return linear_gate(normed_MK, weight_2FK, deterministic=deterministic, rows=rows)
    return rms_norm_matmul_silu_and_mul(x_MK, norm_K, eps, weight_2FK, deterministic=deterministic, rows=rows)


def _add_adapted(y_MN: Tensor, x_MK: Tensor, matrix: Adapted, *, deterministic: bool) -> None:
    pairs, adapters_M = matrix.pairs, matrix.adapters_M
    if isinstance(pairs, LowRank):
        add_low_rank(y_MN, x_MK, pairs, adapters_M, deterministic=deterministic)
        return
    for adapter in adapters_M.unique().tolist():
        if adapter >= 0:
            own_M = adapters_M == adapter
            low_MR = _onednn(x_MK[own_M], pairs.downs[adapter], None)
            y_MN[own_M] += _onednn(low_MR, pairs.ups[adapter], None)


def _onednn(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    alone = len(x_MK) == 1  # then oneDNN sums in an order of its own: it is computed twice, which takes as long
    x_MK = x_MK.repeat(2, 1) if alone else x_MK
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return y_MN[:1] if alone else y_MN
