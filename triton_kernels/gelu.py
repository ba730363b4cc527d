"""GELU of a product without gates, in the three forms that models have.

Shape suffixes: T tokens, F intermediate size.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

KINDS = ("exact", "tanh", "quick")
"""With the error function, with an approximation by tanh, and x times the sigmoid of 1.702 x."""
_BLOCK = 1024


@triton.jit
def _gelu_kernel(x_ptr, F: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, ceil(F / BLOCK)): one program changes BLOCK numbers of a row."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptrs = x_ptr + tl.program_id(0).to(tl.int64) * F + columns
    x = tl.load(x_ptrs, mask=columns < F, other=0.0).to(tl.float32)
    if KIND == "exact":
        y = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    elif KIND == "tanh":
        # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)); 2 z is the square root of 8 / pi times this.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = x / (1.0 + tl.exp(-1.702 * x))
    tl.store(x_ptrs, y.to(x_ptr.dtype.element_ty), mask=columns < F)


def gelu(x_TF: Tensor, kind: str) -> Tensor:
    """Change `x_TF` in place, and return it. `kind`: one of KINDS. fp32 inside, rounded once; graph-safe."""
    check_shape("x", x_TF, None, None)
    check_dtype("x", x_TF, *FLOATS)
    check_contiguous("x", x_TF)
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, wanted {' or '.join(map(repr, KINDS))}")
    if not use_kernels(x_TF):
        return gelu_reference(x_TF, kind)
    T, width = x_TF.shape
    if x_TF.numel():
        block = min(next_power_of_2(width), _BLOCK)
        _gelu_kernel[(T, cdiv(width, block))](
            x_TF, F=width, KIND=kind, BLOCK=block, num_warps=max(block // 256, 1), **overlap_options(x_TF)
        )  # fmt: skip
    return x_TF


def gelu_reference(x_TF: Tensor, kind: str) -> Tensor:
    """The same in PyTorch."""
    wide_TF = x_TF.float()
    if kind == "quick":
        return x_TF.copy_(wide_TF * torch.sigmoid(1.702 * wide_TF))
    return x_TF.copy_(F.gelu(wide_TF, approximate="tanh" if kind == "tanh" else "none"))
