"""Layer norm with a bias, alone and fused with the residual add before it. The last dimension is normed.

Shape suffixes: T tokens, D the normed size.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import check_norm, row_warps
from tercet.triton_kernels.checks import check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program norms one row, the one that it adds to the residual first, if it is to."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
        # Rounded before the norm: the same numbers as when another kernel had written the residual.
        total = (residual + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * D + columns, total, mask=mask)
        x = total.to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x) / D, 0.0)
    y = tl.fma(centred * tl.rsqrt(tl.sum(centred * centred) / D + eps), weight, bias)
    tl.store(out_ptr + row * D + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Norm the last dimension of `x_TD` ([..., D]), scale and shift it. Mutates nothing; sums in fp32; graph-safe."""
    _check(x_TD, weight_D, bias_D)
    if not use_kernels(x_TD):
        return layer_norm_reference(x_TD, weight_D, bias_D, eps)
    return _launch(x_TD, None, weight_D, bias_D, eps)


def add_layer_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Add `x_TD` into `residual_TD` in place; return the sum, normed, scaled and shifted. Sums in fp32; graph-safe."""
    _check(residual_TD, weight_D, bias_D)
    check_shape("x", x_TD, *residual_TD.shape)
    check_same("x", x_TD, residual_TD)
    if not use_kernels(x_TD):
        return add_layer_norm_reference(x_TD, residual_TD, weight_D, bias_D, eps)
    return _launch(x_TD, residual_TD, weight_D, bias_D, eps)


def layer_norm_reference(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """The same in PyTorch."""
    return F.layer_norm(x_TD.float(), (x_TD.shape[-1],), weight_D.float(), bias_D.float(), eps).to(x_TD.dtype)


def add_layer_norm_reference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """The same in PyTorch, `residual_TD` in place as well."""
    return layer_norm_reference(residual_TD.add_(x_TD), weight_D, bias_D, eps)


def _launch(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    out_TD = torch.empty_like(x_TD)
    D = x_TD.shape[-1]
    if T := x_TD.numel() // D:
        _layer_norm_kernel[(T,)](
            x_TD, x_TD if residual_TD is None else residual_TD, weight_D, bias_D, out_TD, eps,
            D=D, BLOCK_D=next_power_of_2(D), ADDS=residual_TD is not None, num_warps=row_warps(D),
            **overlap_options(x_TD),
        )  # fmt: skip
    return out_TD


def _check(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor) -> None:
    check_norm(x_TD, weight_D)
    check_shape("bias", bias_D, x_TD.shape[-1])
    check_same("bias", bias_D, x_TD, torch.float32)
