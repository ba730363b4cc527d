"""The residual add of the last block, behind which no norm of all tokens follows.

Shape suffixes: T tokens, D hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous

_BLOCK = 1024


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["size"])
def _residual_add_kernel(x_ptr, residual_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (ceil(size / BLOCK),): one program adds BLOCK numbers."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    tl.store(residual_ptr + index, (residual + x).to(residual_ptr.dtype.element_ty), mask=index < size)


def residual_add(x_TD: Tensor, residual_TD: Tensor) -> Tensor:
    """Add `x_TD` into `residual_TD` in place, and return that. In fp32, rounded once; graph-safe."""
    check_dtype("x", x_TD, *FLOATS)
    check_contiguous("x", x_TD)
    check_shape("residual", residual_TD, *x_TD.shape)
    check_same("residual", residual_TD, x_TD)
    if not use_kernels(x_TD):
        return residual_add_reference(x_TD, residual_TD)
    if size := x_TD.numel():
        _residual_add_kernel[(triton.cdiv(size, _BLOCK),)](
            x_TD, residual_TD, size, BLOCK=_BLOCK, num_warps=4, **overlap_options(x_TD)
        )
    return residual_TD


def residual_add_reference(x_TD: Tensor, residual_TD: Tensor) -> Tensor:
    """The same in PyTorch."""
    return residual_TD.add_(x_TD)
