"""Rows rounded to eight bits, for products of those: beside them a scale for each group of 128 columns of a row.

Shape suffixes: M rows, K columns, G groups of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FP8, FP8_MOST, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.scaled_weight import stored
from tercet.triton_kernels.tiles import cdiv

GROUP = 128
"""Columns that share a scale."""
_MOST = tl.constexpr(FP8_MOST)
_ROWS = 16
_LEAST = tl.constexpr(2.0**-100)
"""A scale that is no smaller, so that zeros are zeros."""


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _round_rows_kernel(
    x_ptr, numbers_ptr, scales_ptr, rows_ptr, M, K: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / ROWS), K / SIZE): one program rounds a group of columns of some rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    columns = group * SIZE + tl.arange(0, SIZE)
    places = rows.to(tl.int64)[:, None] * K + columns[None, :]
    inside = (rows < M)[:, None]
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS and tl.program_id(0) * ROWS >= tl.load(rows_ptr):
        return
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(x), 1) / _MOST, _LEAST)
    numbers = (x / scales[:, None]).to(numbers_ptr.dtype.element_ty)
    # In the order of products: see `stored`.
    ordered = tl.permute(tl.reshape(numbers, (ROWS, SIZE // 64, 4, 2, 4, 2)), (0, 1, 4, 2, 3, 5))
    tl.store(numbers_ptr + places, tl.reshape(ordered, (ROWS, SIZE)), mask=inside)
    tl.store(scales_ptr + rows * (K // SIZE) + group, scales, mask=rows < M)


def round_rows(x_MK: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """FP8 in the order of products, [M, K], and scales in fp32, [M, K / 128]. Mutates nothing; graph-safe."""
    check_shape("x", x_MK, None, None)
    check_same("x", x_MK, x_MK)
    check_dtype("x", x_MK, torch.bfloat16, torch.float16, torch.float32)
    M, K = x_MK.shape
    if K % GROUP:
        raise ValueError(f"x: got {K} columns, wanted a multiple of {GROUP}")
    if not use_kernels(x_MK):
        return round_rows_reference(x_MK)
    numbers_MK = torch.empty(M, K, dtype=FP8, device=x_MK.device)
    scales_MG = torch.empty(M, K // GROUP, dtype=torch.float32, device=x_MK.device)
    if M:
        _round_rows_kernel[(cdiv(M, _ROWS), K // GROUP)](
            x_MK, numbers_MK, scales_MG, scales_MG if rows is None else rows, M=M, K=K, SIZE=GROUP, ROWS=_ROWS,
            HAS_ROWS=rows is not None, num_warps=4, **overlap_options(x_MK),
        )  # fmt: skip
    return numbers_MK, scales_MG


def round_rows_reference(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    x_MGI = x_MK.float().unflatten(1, (-1, GROUP))
    scales_MG = (x_MGI.abs().amax(2) / FP8_MOST).clamp_min(2.0**-100)
    numbers_MK = (x_MGI / scales_MG[..., None]).to(FP8).flatten(1)
    return stored(numbers_MK), scales_MG
