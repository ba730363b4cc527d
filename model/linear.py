"""Products with weights: the Triton kernels, or on the CPU oneDNN with weights reordered once, when they are loaded.

On two Zen 5 cores the reordered products of a 135M model in fp32 take 10 ms for one row and 18 ms for 16; those of
`torch.nn.functional.linear` take 34 ms and 66 ms.

A product's matrix may have adapters: what they make of each row's numbers is added to what the matrix makes of them.

`deterministic` asks the kernels for a row's bits not to depend on M; in fp32 those of oneDNN never do. `rows`: how many
rows there are in truth, on the device; kernels may leave out those behind.

Shape suffixes: M rows (tokens), K reduced size, N output size, F gated size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, TypeGuard

import torch
from torch import Tensor

from tercet.triton_kernels.add_low_rank import Addition
from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.low_rank import LowRank, Norm
from tercet.triton_kernels.matmul import (
    matmul,
    matmul_add,
    matmul_silu_and_mul,
    norming_config,
    rms_norm_matmul,
    rms_norm_matmul_silu_and_mul,
)
from tercet.triton_kernels.matmul_parts import matmul_parts
from tercet.triton_kernels.overlap import next_starts_late
from tercet.triton_kernels.row_groups import RowGroups
from tercet.triton_kernels.scaled_weight import Weight


@dataclass(frozen=True)
class ReorderedPairs:
    """A `LowRank` for the CPU, each adapter's matrices reordered: so a row's bits do not depend on M there either."""

    downs: list[Tensor]
    ups: list[Tensor]

    def __len__(self) -> int:
        return len(self.downs)


Pairs = LowRank | ReorderedPairs


@dataclass(frozen=True)
class Adapted:
    """A matrix in a step of which some rows have adapters."""

    weight_NK: Weight
    pairs: Pairs
    groups: RowGroups
    """The rows, by their adapters."""

    def __len__(self) -> int:
        return len(self.weight_NK)


Matrix = Weight | Adapted


class How(TypedDict):
    """What is passed on to kernels."""

    deterministic: bool
    rows: Tensor | None


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
    downs = list(map(reorder_for_cpu, low_rank.down_ARK))
    ups = [reorder_for_cpu(low_rank.whole_up(adapter)) for adapter in range(len(downs))]
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
        product = partial(linear, x_MK, weight_NK.weight_NK, bias_N, out, deterministic=deterministic, rows=rows)
        return _add_adapted(product, x_MK, weight_NK)
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
    how: How = {"deterministic": deterministic, "rows": rows}
    if isinstance(weight_NK, Adapted):
        if norming_config("rms_norm_matmul", x_MK, norm_K, weight_NK.weight_NK, deterministic) is None:
            return linear(rms_norm(x_MK, norm_K, eps, rows, deterministic=deterministic), weight_NK, bias_N, **how)
        product = partial(rms_norm_matmul, x_MK, norm_K, eps, weight_NK.weight_NK, bias_N, **how)
        return _add_adapted(product, x_MK, weight_NK, Norm(norm_K, eps))
    if is_reordered(weight_NK):
        return _onednn(rms_norm(x_MK, norm_K, eps), weight_NK, bias_N)
    return rms_norm_matmul(x_MK, norm_K, eps, weight_NK, bias_N, **how)


def linear_add(
    x_MK: Tensor, weight_NK: Matrix, residual_MN: Tensor, *, deterministic: bool, rows: Tensor | None = None
) -> Tensor:
    """residual += x W^T, in place; the residual."""
    if isinstance(weight_NK, Adapted):
        product = partial(linear_add, x_MK, weight_NK.weight_NK, residual_MN, deterministic=deterministic, rows=rows)
        return _add_adapted(product, x_MK, weight_NK)
    if is_reordered(weight_NK):
        return residual_MN.add_(_onednn(x_MK, weight_NK, None))
    matmul_add(x_MK, weight_NK, residual_MN, deterministic=deterministic, rows=rows)
    return residual_MN


def linear_gate(
    x_MK: Tensor, weight_2FK: Matrix, out: Tensor | None = None, *, deterministic: bool, rows: Tensor | None = None
) -> Tensor:
    """silu(gate) * up of x W^T, whose rows are gate and up in turns: [M, F]."""
    if isinstance(weight_2FK, Adapted):
        assert out is None  # steps with adapters are not cut
        product = partial(linear, x_MK, weight_2FK.weight_NK, None, deterministic=deterministic, rows=rows)
        return _add_adapted(product, x_MK, weight_2FK, gate=True)
    return matmul_silu_and_mul(x_MK, weight_2FK, out, deterministic=deterministic, rows=rows)


def rms_norm_linear_gate(
    x_MK: Tensor, norm_K: Tensor, eps: float, weight_2FK: Matrix, *, deterministic: bool, rows: Tensor | None = None
) -> Tensor:
    """`linear_gate` of the normed rows of x."""
    how: How = {"deterministic": deterministic, "rows": rows}
    if isinstance(weight_2FK, Adapted):
        if norming_config("rms_norm_matmul", x_MK, norm_K, weight_2FK.weight_NK, deterministic) is None:
            return linear_gate(rms_norm(x_MK, norm_K, eps, rows, deterministic=deterministic), weight_2FK, **how)
        product = partial(rms_norm_matmul, x_MK, norm_K, eps, weight_2FK.weight_NK, **how)
        return _add_adapted(product, x_MK, weight_2FK, Norm(norm_K, eps), gate=True)
    return rms_norm_matmul_silu_and_mul(x_MK, norm_K, eps, weight_2FK, **how)


def linear_parts(x_MK: Tensor, weight_NK: Matrix, *, whole: str, rows: Tensor | None) -> Tensor | None:
    """x W^T by parts of K, in fp32: [S, M, N], or None where it is better done whole. `whole`: what would do so."""
    if is_reordered(weight_NK):
        return None
    if not isinstance(weight_NK, Adapted):
        return matmul_parts(x_MK, weight_NK, rows, whole=whole)
    if isinstance(weight_NK.pairs, ReorderedPairs):
        return None
    addition = Addition(x_MK, weight_NK.pairs, weight_NK.groups)
    with next_starts_late():
        parts_SMN = matmul_parts(x_MK, weight_NK.weight_NK, rows, whole=whole)
    if parts_SMN is not None:
        addition.to(parts_SMN[0])
    return parts_SMN


def _add_adapted(
    product: Callable[[], Tensor],
    x_MK: Tensor,
    matrix: Adapted,
    norm: Norm | None = None,
    *,
    gate: bool = False,
) -> Tensor:
    """What `product` makes of x (normed, if there is a norm) with what adapters make of it; `gate`: gated."""
    pairs, groups = matrix.pairs, matrix.groups
    if isinstance(pairs, LowRank):
        addition = Addition(x_MK, pairs, groups, norm)
        with next_starts_late():
            y_MN = product()
        return addition.to(y_MN, gate=gate)
    assert norm is None  # on the CPU
    assert not gate  # they are apart
    y_MN = product()
    for adapter in groups.adapters_T.unique().tolist():
        if adapter >= 0:
            own_M = groups.adapters_T == adapter
            low_MR = _onednn(x_MK[own_M], pairs.downs[adapter], None)
            y_MN[own_M] += _onednn(low_MR, pairs.ups[adapter], None)
    return y_MN


def _onednn(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """A row alone oneDNN would sum in an order of its own; and of weights that no cache holds, four rows take two
    thirds of the time of one or two."""
    num_rows = len(x_MK)
    few = 0 < num_rows <= 2
    x_MK = torch.cat((x_MK,) * (4 // num_rows)) if few else x_MK  # `repeat` takes 30 us more, a product 30 to 400
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return y_MN[:num_rows] if few else y_MN
