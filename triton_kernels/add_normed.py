"""What a block computed, normed and then added to the residual: alone, and fused with the norm behind it.

As in `add_rms_norm.py`: `rows` says how many rows there are in truth, int32 [1] on the device, and those behind may be
left as they are; with `deterministic` a row's bits do not depend on T. `scale`: one number on the device, which the sum
is multiplied by.

Shape suffixes: T tokens, D hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import check_norm, norm_options, rms_norm_reference
from tercet.triton_kernels.checks import check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight


@triton.jit
def _add_row(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, rows_ptr, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm the program's row and add it to the residual's; the sum, scaled, its places, and which of them there are.

    Rounded before any norm behind it, as in `_add_rms_norm_kernel`.
    """
    columns = tl.arange(0, BLOCK_D)
    places = tl.program_id(0).to(tl.int64) * D + columns
    mask = columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        mask &= tl.program_id(0) < tl.load(rows_ptr)
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    total = residual + _normed(x, weight, eps, D)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr)
    total = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + places, total, mask=mask)
    return total, places, mask


@triton.jit
def _add_normed_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, rows_ptr, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program norms one row and adds it to the residual's."""
    _add_row(x_ptr, residual_ptr, weight_ptr, scale_ptr, rows_ptr, eps, D, BLOCK_D, HAS_ROWS, PDL)


@triton.jit
def _add_normed_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, next_weight_ptr, out_ptr, rows_ptr, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program norms one row, adds it to the residual's and norms the rounded sum."""
    columns = tl.arange(0, BLOCK_D)
    next_weight = tl.load(next_weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    total, places, mask = _add_row(x_ptr, residual_ptr, weight_ptr, scale_ptr, rows_ptr, eps, D, BLOCK_D, HAS_ROWS, PDL)
    y = _normed(total.to(tl.float32), next_weight, eps, D)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)


def add_normed(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, rows: Tensor | None = None, *,
    scale: Tensor | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Norm and weigh `x_TD`, add that into `residual_TD` in place, and return it. In fp32, rounded once; graph-safe."""
    _check(x_TD, residual_TD, weight_D, scale)
    if not use_kernels(x_TD):
        return add_normed_reference(x_TD, residual_TD, weight_D, eps, scale)
    T, D = x_TD.shape
    if T:
        _add_normed_kernel[(T,)](
            x_TD, residual_TD, weight_D, scale, x_TD if rows is None else rows, eps,
            D=D, HAS_ROWS=rows is not None, **norm_options(T, D, x_TD, deterministic),
        )  # fmt: skip
    return residual_TD


def add_normed_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, next_weight_D: Tensor, eps: float,
    rows: Tensor | None = None, *, scale: Tensor | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """The same; return the sum, normed and weighed by `next_weight_D`. In fp32; graph-safe."""
    _check(x_TD, residual_TD, weight_D, scale)
    check_norm(x_TD, next_weight_D)
    if not use_kernels(x_TD):
        return add_normed_rms_norm_reference(x_TD, residual_TD, weight_D, next_weight_D, eps, scale)
    out_TD = torch.empty_like(residual_TD)
    T, D = x_TD.shape
    if T:
        _add_normed_rms_norm_kernel[(T,)](
            x_TD, residual_TD, weight_D, scale, next_weight_D, out_TD, x_TD if rows is None else rows, eps,
            D=D, HAS_ROWS=rows is not None, **norm_options(T, D, x_TD, deterministic),
        )  # fmt: skip
    return out_TD


def add_normed_reference(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """`add_normed` in PyTorch."""
    if x_TD.dtype == torch.float32:
        total_TD = residual_TD.add_(rms_norm_reference(x_TD, weight_D, eps))
        return total_TD if scale is None else total_TD.mul_(scale)
    total_TD = residual_TD.float() + rms_norm_reference(x_TD.float(), weight_D.float(), eps)
    return residual_TD.copy_(total_TD if scale is None else total_TD * scale)


def add_normed_rms_norm_reference(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, next_weight_D: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """`add_normed_rms_norm` in PyTorch, `residual_TD` in place as well."""
    return rms_norm_reference(add_normed_reference(x_TD, residual_TD, weight_D, eps, scale), next_weight_D, eps)


def _check(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, scale: Tensor | None) -> None:
    check_shape("x", x_TD, None, None)
    check_norm(x_TD, weight_D)
    check_shape("residual", residual_TD, *x_TD.shape)
    check_same("residual", residual_TD, x_TD)
    if scale is not None:
        check_shape("scale", scale, 1)
        check_dtype("scale", scale, torch.float32)
        check_device("scale", scale, x_TD)
