"""RMS norm, alone and fused with the residual add before it. The last dimension is normed: hidden rows or heads.

`rows`: how many rows there are in truth, int32 [1] on the device; those behind may be left as they are.
`deterministic`: a row's bits do not depend on T.

Shape suffixes: T tokens (or tokens x heads), D the normed size, S parts of an update (matmul_parts.py).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.residual_add import check_update, residual_add_reference
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

# Registers of one program hold its whole row.
_MAX_D = 16384
_FEW_ROWS = 2048
"""Up to here a program for each row; beyond, programs that keep the weight for several."""
_FEW_NUMBERS = 512 * 1024
"""In all rows. Up to here multiprocessors have room for more warps a row, each with less to load; but sums are in
another order then."""


@triton.jit
def _nothing():
    return ()


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["T"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows_ptr, eps, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / ROWS,): one program norms ROWS rows, each alone in its registers: so its bits are its own.

    From the last row to the first: of many rows the L2 cache still holds what was written last, and then what the
    product behind reads first.
    """
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    x = _nothing()
    for index in tl.static_range(ROWS):  # all are on their way before the first is normed
        offset = tl.cast(first + index, tl.int64) * D
        x += (tl.load(x_ptr + offset + columns, mask=mask & (first + index < T), other=0.0),)
    for index in tl.static_range(ROWS):
        offset = tl.cast(first + index, tl.int64) * D
        wide = x[index].to(tl.float32)
        y = wide * tl.rsqrt(tl.sum(wide * wide) / D + eps) * weight
        tl.store(out_ptr + offset + columns, y.to(out_ptr.dtype.element_ty), mask=mask & (first + index < T))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["T"])
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, rows_ptr, eps, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program adds one row, the sum of its parts, into the residual and norms the rounded sum."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        mask &= row < tl.load(rows_ptr)
    x = tl.load(x_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * T + row) * D + columns, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the norm: the same numbers as when another kernel had written the residual.
    total = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + row * D + columns, total, mask=mask)
    total = total.to(tl.float32)
    y = total * tl.rsqrt(tl.sum(total * total) / D + eps) * weight
    tl.store(out_ptr + row * D + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, rows: Tensor | None = None, *, deterministic: bool = False
) -> Tensor:
    """Norm the last dimension of `x_TD` ([..., D]) and scale it. Mutates nothing; sums in fp32; graph-safe."""
    check_norm(x_TD, weight_D)
    if not use_kernels(x_TD):
        return rms_norm_reference(x_TD, weight_D, eps)
    out_TD = torch.empty_like(x_TD)
    D = x_TD.shape[-1]
    if T := x_TD.numel() // D:
        each = 1 if T <= _FEW_ROWS else 8
        _rms_norm_kernel[(cdiv(T, each),)](
            x_TD, weight_D, out_TD, x_TD if rows is None else rows, eps, T,
            D=D, ROWS=each, HAS_ROWS=rows is not None, **norm_options(T, D, x_TD, deterministic),
        )  # fmt: skip
    return out_TD


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, rows: Tensor | None = None, *,
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Add `x_TD` into `residual_TD` in place; return the sum, normed and scaled. Sums in fp32; graph-safe.

    `x_TD` may be an update's parts, [S, T, D] in fp32: they are summed in order, and rounded with the residual once.
    """
    parts = check_update(x_TD, residual_TD)
    check_norm(residual_TD, weight_D)
    if not use_kernels(x_TD):
        return add_rms_norm_reference(x_TD, residual_TD, weight_D, eps)
    out_TD = torch.empty_like(residual_TD)
    D = residual_TD.shape[-1]
    if T := residual_TD.numel() // D:
        _add_rms_norm_kernel[(T,)](
            x_TD, residual_TD, weight_D, out_TD, x_TD if rows is None else rows, eps, T,
            D=D, PARTS=parts, HAS_ROWS=rows is not None, **norm_options(T, D, x_TD, deterministic),
        )  # fmt: skip
    return out_TD


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in PyTorch."""
    if x_TD.dtype == torch.float32:
        return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)
    return F.rms_norm(x_TD.float(), (x_TD.shape[-1],), weight_D.float(), eps).to(x_TD.dtype)


def add_rms_norm_reference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in PyTorch, `residual_TD` in place as well."""
    return rms_norm_reference(residual_add_reference(x_TD, residual_TD), weight_D, eps)


def check_norm(x_TD: Tensor, weight_D: Tensor) -> None:
    """Rows to be normed and what they are scaled by, in their type or in fp32, or raise."""
    check_dtype("x", x_TD, *FLOATS)
    check_contiguous("x", x_TD)
    if x_TD.ndim < 1 or not 0 < x_TD.shape[-1] <= _MAX_D:
        raise ValueError(f"x: got shape {list(x_TD.shape)}, wanted a last dimension of 1 to {_MAX_D}")
    check_shape("weight", weight_D, x_TD.shape[-1])
    check_same("weight", weight_D, x_TD, torch.float32)


def row_warps(D: int) -> int:
    """Warps that norm one of many rows. From this and D a row's bits follow."""
    return min(max(next_power_of_2(D) // 512, 1), 16)


def norm_options(T: int, D: int, x_TD: Tensor, deterministic: bool) -> dict[str, int | bool]:
    """Columns of one program, its warps, and how it is launched."""
    warps = row_warps(D)
    if not deterministic and T * D <= _FEW_NUMBERS:
        warps = min(max(next_power_of_2(D) // 128, 1), 32)
    return {"BLOCK_D": next_power_of_2(D), "num_warps": warps, **overlap_options(x_TD)}
