"""Rotary position embedding where each row has cosines and sines of its own: queries and keys in place, in NeoX halves.

Queries and keys of a row lie side by side, with values behind them.

Shape suffixes: T tokens, N numbers of a row (H query heads, H key heads, H value heads), D head size, R rotary
dimension (R/2 cosines, then R/2 sines).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_BLOCK = 1024
"""Pairs of numbers of one program."""


@triton.jit
def _turn_rows_kernel(
    qkv_ptr, cos_sin_ptr, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, 2 H / BLOCK_H): one program turns some heads of one token."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_sin_ptr + token * D + pairs, mask=pairs < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + token * D + HALF + pairs, mask=pairs < HALF, other=0.0)
    mask = (heads < 2 * H) & (pairs < HALF)
    start = qkv_ptr + token * (3 * H * D) + heads * D + pairs
    first = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(start, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(start + HALF, (second * cos + first * sin).to(dtype), mask=mask)


def turn_rows(qkv_TN: Tensor, cos_sin_TR: Tensor, num_heads: int) -> None:
    """Turn queries and keys of row t by row t of `cos_sin_TR` (fp32, R = D), in place. fp32 inside; graph-safe."""
    check_qkv(qkv_TN, num_heads)
    T, D = len(qkv_TN), qkv_TN.shape[1] // (3 * num_heads)
    if D % 2:
        raise ValueError(f"qkv: got heads of {D} numbers, wanted an even number")
    check_shape("cos_sin", cos_sin_TR, T, D)
    check_dtype("cos_sin", cos_sin_TR, torch.float32)
    check_contiguous("cos_sin", cos_sin_TR)
    check_device("cos_sin", cos_sin_TR, qkv_TN)
    if not use_kernels(qkv_TN):
        turn_rows_reference(qkv_TN, cos_sin_TR, num_heads)
    elif T:
        block_half = next_power_of_2(D // 2)
        block_h = min(next_power_of_2(2 * num_heads), max(_BLOCK // block_half, 1))
        _turn_rows_kernel[(T, cdiv(2 * num_heads, block_h))](
            qkv_TN, cos_sin_TR, H=num_heads, D=D, BLOCK_H=block_h, BLOCK_HALF=block_half, num_warps=4,
            **overlap_options(qkv_TN),
        )  # fmt: skip


def turn_rows_reference(qkv_TN: Tensor, cos_sin_TR: Tensor, num_heads: int) -> None:
    """The same in PyTorch."""
    x_TGHD = qkv_TN.view(len(qkv_TN), 3, num_heads, -1)[:, :2]
    first, second = x_TGHD.float().chunk(2, -1)
    cos, sin = cos_sin_TR[:, None, None, :].chunk(2, -1)
    x_TGHD.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def check_qkv(qkv_TN: Tensor, num_heads: int) -> None:
    """Rows of so many heads for queries, and as many for keys and values, or raise."""
    check_dtype("qkv", qkv_TN, *FLOATS)
    check_shape("qkv", qkv_TN, None, None)
    check_contiguous("qkv", qkv_TN)
    if num_heads < 1 or qkv_TN.shape[1] % (3 * num_heads) or not qkv_TN.shape[1]:
        raise ValueError(f"qkv: got {qkv_TN.shape[1]} columns, wanted a multiple of {3 * num_heads}")
