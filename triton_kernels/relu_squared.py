"""What an MLP without a gate makes of its first product: ReLU, squared.

Shape suffixes: T tokens, F intermediate size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit
def squared(x):
    """In fp32."""
    x = tl.maximum(x, 0.0)
    return x * x


@triton.jit
def _relu_squared_kernel(x_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, F / BLOCK): one program owns BLOCK numbers of one token."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = tl.program_id(0).to(tl.int64) * F + columns
    let_next_start(PDL)
    wait_for_previous(PDL)
    y = squared(tl.load(x_ptr + places, mask=columns < F, other=0.0).to(tl.float32))
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=columns < F)


def relu_squared(x_TF: Tensor) -> Tensor:
    """[T, F] -> [T, F]. Mutates nothing; fp32 inside, rounded once; graph-safe."""
    check_dtype("x", x_TF, *FLOATS)
    check_shape("x", x_TF, None, None)
    check_contiguous("x", x_TF)
    if not use_kernels(x_TF):
        return relu_squared_reference(x_TF)
    out_TF = torch.empty_like(x_TF)
    if x_TF.numel():
        T, F = x_TF.shape
        _relu_squared_kernel[(T, cdiv(F, _BLOCK))](
            x_TF, out_TF, F=F, BLOCK=_BLOCK, num_warps=4, **overlap_options(x_TF)
        )  # fmt: skip
    return out_TF


def relu_squared_reference(x_TF: Tensor) -> Tensor:
    """The same in PyTorch."""
    return x_TF.float().relu().square().to(x_TF.dtype)
