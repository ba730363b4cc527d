"""RMS norms of each head's queries, of its keys and of its values, where a row has all heads' side by side.

Shape suffixes: T tokens, N numbers of a row (H query heads, H key heads, H value heads), D head size.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.turn_rows import check_qkv

_BLOCK = 1024
"""Numbers of one program."""


@triton.jit
def _norm_heads_kernel(
    qkv_ptr, weight_ptr, eps, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, 3 H / BLOCK_H): one program norms some heads of one token."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < 3 * H) & (columns < D)
    places = qkv_ptr + token * (3 * H * D) + heads * D + columns
    x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + heads // H * D + columns, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps) * weight
    tl.store(places, y.to(qkv_ptr.dtype.element_ty), mask=mask)


def norm_heads(qkv_TN: Tensor, weight_3D: Tensor, num_heads: int, eps: float) -> None:
    """Norm each head in place, and scale it by the weight for queries, for keys or for values. fp32 inside, rounded
    once; graph-safe."""
    check_qkv(qkv_TN, num_heads)
    T, D = len(qkv_TN), qkv_TN.shape[1] // (3 * num_heads)
    check_shape("weight", weight_3D, 3, D)
    check_dtype("weight", weight_3D, *FLOATS)
    check_contiguous("weight", weight_3D)
    check_device("weight", weight_3D, qkv_TN)
    if not use_kernels(qkv_TN):
        norm_heads_reference(qkv_TN, weight_3D, num_heads, eps)
    elif T:
        block_d = next_power_of_2(D)
        block_h = min(next_power_of_2(3 * num_heads), max(_BLOCK // block_d, 1))
        _norm_heads_kernel[(T, cdiv(3 * num_heads, block_h))](
            qkv_TN, weight_3D, eps, H=num_heads, D=D, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
            **overlap_options(qkv_TN),
        )  # fmt: skip


def norm_heads_reference(qkv_TN: Tensor, weight_3D: Tensor, num_heads: int, eps: float) -> None:
    """The same in PyTorch."""
    x_T3HD = qkv_TN.view(len(qkv_TN), 3, num_heads, weight_3D.shape[1])
    wide = x_T3HD.float()
    x_T3HD.copy_(wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_3D.float()[:, None])
