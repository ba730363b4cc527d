"""silu(gate) * up over the fused gate_up product.

Shape suffixes: T tokens, F intermediate size; 2F gate columns then up columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import cdiv

_BLOCK_F = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, F: tl.constexpr, BLOCK_F: tl.constexpr):
    """Grid (T, ceil(F / BLOCK_F)): one program owns BLOCK_F columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < F
    start = x_ptr + row * 2 * F + columns
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + F, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * F + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x_T2F: Tensor) -> Tensor:
    """[T, 2F] gate columns then up columns -> [T, F]. Mutates nothing; fp32 inside; graph-safe."""
    check_gate_up(x_T2F)
    if not use_kernels(x_T2F):
        return silu_and_mul_reference(*x_T2F.chunk(2, dim=1))
    return launch_gate(_silu_and_mul_kernel, x_T2F)


def check_gate_up(x_T2F: Tensor) -> None:
    """Gate columns and as many up columns, or raise."""
    check_dtype("x", x_T2F, *FLOATS)
    if x_T2F.ndim != 2 or x_T2F.shape[1] % 2:
        raise ValueError(f"x: got shape {list(x_T2F.shape)}, wanted [*, an even number]")
    check_contiguous("x", x_T2F)


def launch_gate(kernel: JITFunction[Any], x_T2F: Tensor, **options: int) -> Tensor:
    """What a kernel of this grid makes of gate and up columns: [T, F]. `options`: how it overlaps."""
    T, num_columns = x_T2F.shape[0], x_T2F.shape[1] // 2
    out_TF = torch.empty(T, num_columns, dtype=x_T2F.dtype, device=x_T2F.device)
    if T and num_columns:
        grid = (T, cdiv(num_columns, _BLOCK_F))
        kernel[grid](x_T2F, out_TF, F=num_columns, BLOCK_F=_BLOCK_F, num_warps=4, **options)
    return out_TF


def silu_and_mul_reference(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """The same in PyTorch, of gate and up columns that may lie anywhere."""
    if gate_TF.dtype == torch.float32:
        return F.silu(gate_TF).mul_(up_TF)
    return (F.silu(gate_TF.float()) * up_TF.float()).to(gate_TF.dtype)
