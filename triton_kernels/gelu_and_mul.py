"""gelu(gate) * up over the fused gate_up product, with the approximation by tanh.

Shape suffixes: T tokens, F intermediate size; 2F gate columns then up columns.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.silu_and_mul import check_gate_up, launch_gate


@triton.jit
def gelu(x):
    """In fp32."""
    # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)); 2 z is the square root of 8 / pi times this.
    bent = x + 0.044715 * x * x * x
    return x / (1.0 + tl.exp(-1.5957691216057308 * bent))


@triton.jit
def _gelu_and_mul_kernel(x_ptr, out_ptr, F: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, ceil(F / BLOCK_F)): one program owns BLOCK_F columns of one row."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < F
    start = x_ptr + row * 2 * F + columns
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + F, mask=mask, other=0.0).to(tl.float32)
    y = gelu(gate) * up
    tl.store(out_ptr + row * F + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def gelu_and_mul(x_T2F: Tensor) -> Tensor:
    """[T, 2F] gate columns then up columns -> [T, F]. Mutates nothing; fp32 inside; graph-safe."""
    check_gate_up(x_T2F)
    if not use_kernels(x_T2F):
        return gelu_and_mul_reference(*x_T2F.chunk(2, dim=1))
    return launch_gate(_gelu_and_mul_kernel, x_T2F, **overlap_options(x_T2F))


def gelu_and_mul_reference(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """The same in PyTorch."""
    if gate_TF.dtype == torch.float32:
        return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)
    return (F.gelu(gate_TF.float(), approximate="tanh") * up_TF.float()).to(gate_TF.dtype)
