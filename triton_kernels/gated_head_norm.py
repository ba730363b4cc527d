"""RMS norm of each head of a gated delta layer's answers, times SiLU of the numbers that gate them.

Shape suffixes: T tokens, H heads of V numbers, N numbers of the rows that hold the gates.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_BLOCK = 1024
"""Numbers of one program."""


@triton.jit(do_not_specialize=["first_column"], do_not_specialize_on_alignment=["first_column"])
def _gated_head_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, rows_ptr, eps, first_column,
    H: tl.constexpr, V: tl.constexpr, N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, H / BLOCK_H): one program owns some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    numbers = tl.arange(0, BLOCK_V)[None, :]
    mask = (heads < H) & (numbers < V)
    columns = heads * V + numbers
    weight = tl.load(weight_ptr + numbers, mask=numbers < V, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        mask &= token < tl.load(rows_ptr)
    x = tl.load(x_ptr + token * (H * V) + columns, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * N + first_column + columns, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * weight * (z / (1.0 + tl.exp(-z)))
    tl.store(out_ptr + token * (H * V) + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def gated_head_norm(
    x_THV: Tensor, z_TN: Tensor, first_column: int, weight_V: Tensor, eps: float, *, rows: Tensor | None
) -> Tensor:
    """[T, H, V] -> [T, H V]: each head normed and scaled, times SiLU of its gates.

    The gates are H V columns of `z_TN` from `first_column` on. `rows`: how many tokens there are in truth, int32 [1] on
    the device; those behind may be left as they are. Mutates nothing; fp32 inside, rounded once; graph-safe.
    """
    check_dtype("x", x_THV, *FLOATS)
    check_shape("x", x_THV, None, None, None)
    check_contiguous("x", x_THV)
    T, H, V = x_THV.shape
    check_gates("z", z_TN, first_column, x_THV, H * V)
    check_shape("weight", weight_V, V)
    check_same("weight", weight_V, x_THV, torch.float32)
    if rows is not None:
        check_indices("rows", rows, x_THV, 1)
    if not use_kernels(x_THV):
        return gated_head_norm_reference(x_THV, z_TN, first_column, weight_V, eps)
    out_TH = x_THV.new_empty(T, H * V)
    if out_TH.numel():
        block_v = next_power_of_2(V)
        block_h = min(next_power_of_2(H), max(_BLOCK // block_v, 1))
        _gated_head_norm_kernel[(T, cdiv(H, block_h))](
            x_THV, z_TN, weight_V, out_TH, x_THV if rows is None else rows, eps, first_column,
            H=H, V=V, N=z_TN.shape[1], BLOCK_H=block_h, BLOCK_V=block_v, HAS_ROWS=rows is not None, num_warps=4,
            **overlap_options(x_THV),
        )  # fmt: skip
    return out_TH


def gated_head_norm_reference(x_THV: Tensor, z_TN: Tensor, first_column: int, weight_V: Tensor, eps: float) -> Tensor:
    """The same in PyTorch; SiLU in fp64, for in fp32 it is rounded otherwise at the end of a tensor."""
    _, H, V = x_THV.shape
    z_THV = z_TN[:, first_column : first_column + H * V].unflatten(1, (H, V))
    normed_THV = F.rms_norm(x_THV.float(), (V,), weight_V.float(), eps)
    return (normed_THV * F.silu(z_THV.double()).float()).to(x_THV.dtype).flatten(1)


def check_gates(name: str, gates_TN: Tensor, first_column: int, like: Tensor, num_columns: int) -> None:
    """Rows of which so many columns are gates of the rows of `like`, or raise."""
    check_shape(name, gates_TN, like.shape[0], None)
    check_same(name, gates_TN, like)
    if not 0 <= first_column <= gates_TN.shape[1] - num_columns:
        raise ValueError(
            f"first_column: got {first_column}, wanted one with {num_columns} of the {gates_TN.shape[1]} columns behind"
        )
