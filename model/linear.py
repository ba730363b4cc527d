"""Products with weights: the Triton kernels, or on the CPU oneDNN with weights reordered once, when they are loaded.

On two Zen 5 cores the reordered products of a 135M model in fp32 take 10 ms for one row and 18 ms for 16; those of
`torch.nn.functional.linear` take 34 ms and 66 ms.

`deterministic` asks the kernels for a row's bits not to depend on M; in oneDNN it changes nothing. `rows`: how many
rows there are in truth, on the device; kernels may leave out those behind.

Shape suffixes: M rows (tokens), K reduced size, N output size.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.matmul import matmul, matmul_add, rms_norm_matmul
from tercet.triton_kernels.scaled_weight import Weight


def reorder_for_cpu(weight_NK: Tensor) -> Tensor:
    """The weight as these functions like it best on its device: an opaque oneDNN tensor on the CPU, else itself."""
    if use_kernels(weight_NK) or not torch._C._has_mkldnn:
        return weight_NK
    fits = weight_NK.dtype == torch.float32 or (
        weight_NK.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK) if fits else weight_NK


def is_reordered(weight_NK: Weight) -> TypeGuard[Tensor]:
    return isinstance(weight_NK, Tensor) and weight_NK.is_mkldnn


def linear(
    x_MK: Tensor,
    weight_NK: Weight,
    bias_N: Tensor | None,
    out: Tensor | None = None,
    *,
    deterministic: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """x W^T (+ bias): [M, K] x [N, K] -> [M, N], written to `out` if given."""
    if is_reordered(weight_NK):
        y_MN = _onednn(x_MK, weight_NK, bias_N)
        return y_MN if out is None else out.copy_(y_MN)
    return matmul(x_MK, weight_NK, bias_N, out, deterministic=deterministic, rows=rows)


def rms_norm_linear(
    x_MK: Tensor,
    norm_K: Tensor,
    eps: float,
    weight_NK: Weight,
    bias_N: Tensor | None,
    *,
    deterministic: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """`linear` of the normed rows of x."""
    if is_reordered(weight_NK):
        return _onednn(rms_norm(x_MK, norm_K, eps), weight_NK, bias_N)
    return rms_norm_matmul(x_MK, norm_K, eps, weight_NK, bias_N, deterministic=deterministic, rows=rows)


def linear_add(
    x_MK: Tensor, weight_NK: Weight, residual_MN: Tensor, *, deterministic: bool, rows: Tensor | None = None
) -> None:
    """residual += x W^T, in place."""
    if is_reordered(weight_NK):
        residual_MN.add_(_onednn(x_MK, weight_NK, None))
    else:
        matmul_add(x_MK, weight_NK, residual_MN, deterministic=deterministic, rows=rows)


def _onednn(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return y_MN
