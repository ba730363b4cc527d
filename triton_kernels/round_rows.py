"""Rows rounded to eight bits, for products of those: beside them a scale for each group of 128 columns of a row, or one
for all of them.

Shape suffixes: M rows, K columns, G groups of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, FP8, FP8_MOST, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.scaled_weight import stored
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

GROUP = 128
"""Columns that share a scale."""
LONGEST = 16384
"""Columns of a row that one program has in registers."""
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


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _round_whole_rows_kernel(
    x_ptr, numbers_ptr, scales_ptr, rows_ptr, M, K: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M,): one program rounds a row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    places = row.to(tl.int64) * K + columns
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS and row >= tl.load(rows_ptr):
        return
    x = tl.load(x_ptr + places, mask=columns < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / _MOST, _LEAST)
    numbers = (x / scale).to(numbers_ptr.dtype.element_ty)
    ordered = tl.permute(tl.reshape(numbers, (BLOCK // 64, 4, 2, 4, 2)), (0, 3, 1, 2, 4))
    tl.store(numbers_ptr + places, tl.reshape(ordered, (BLOCK,)), mask=columns < K)
    tl.store(scales_ptr + row, scale)


def round_whole_rows(x_MK: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """FP8 in the order of products, [M, K], and scales in fp32, [M]. Mutates nothing; graph-safe."""
    _check(x_MK)
    M, K = x_MK.shape
    if K > LONGEST:
        raise ValueError(f"x: got {K} columns, wanted {LONGEST} at most")
    if not use_kernels(x_MK):
        numbers_MK, scales_M1 = round_rows_reference(x_MK, K)
        return numbers_MK, scales_M1[:, 0]
    numbers_MK = torch.empty(M, K, dtype=FP8, device=x_MK.device)
    scales_M = torch.empty(M, dtype=torch.float32, device=x_MK.device)
    if M:
        block = next_power_of_2(K)
        _round_whole_rows_kernel[(M,)](
            x_MK, numbers_MK, scales_M, scales_M if rows is None else rows, M=M, K=K, BLOCK=block,
            HAS_ROWS=rows is not None, num_warps=max(4, block // 2048), **overlap_options(x_MK),
        )  # fmt: skip
    return numbers_MK, scales_M


def round_rows(x_MK: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """FP8 in the order of products, [M, K], and scales in fp32, [M, K / 128]. Mutates nothing; graph-safe."""
    _check(x_MK)
    M, K = x_MK.shape
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


def round_rows_reference(x_MK: Tensor, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """The same in PyTorch, with a scale for each `size` columns."""
    x_MGI = x_MK.float().unflatten(1, (-1, size))
    scales_MG = (x_MGI.abs().amax(2) / FP8_MOST).clamp_min(2.0**-100)
    numbers_MK = (x_MGI / scales_MG[..., None]).to(FP8).flatten(1)
    return stored(numbers_MK), scales_MG


def _check(x_MK: Tensor) -> None:
    check_dtype("x", x_MK, *FLOATS)
    check_shape("x", x_MK, None, None)
    check_same("x", x_MK, x_MK)
    if x_MK.shape[1] % GROUP:
        raise ValueError(f"x: got {x_MK.shape[1]} columns, wanted a multiple of {GROUP}")
