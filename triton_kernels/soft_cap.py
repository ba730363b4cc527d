"""Logits softly kept within a cap: cap * tanh(logit / cap).

Shape suffixes: R rows, V columns.
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


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["size"])
def _soft_cap_kernel(x_ptr, size, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (ceil(size / BLOCK),): one program caps BLOCK numbers in place."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    # tanh by an exponential that cannot overflow.
    shrunk = tl.exp(-2.0 * tl.abs(x) / cap)
    y = cap * (1.0 - shrunk) / (1.0 + shrunk)
    tl.store(x_ptr + index, tl.where(x < 0, -y, y).to(x_ptr.dtype.element_ty), mask=index < size)


def soft_cap(logits_RV: Tensor, cap: float) -> Tensor:
    """Cap `logits_RV` in place, and return it. In fp32, rounded once; graph-safe."""
    check_dtype("logits", logits_RV, *FLOATS)
    check_shape("logits", logits_RV, None, None)
    check_contiguous("logits", logits_RV)
    if not use_kernels(logits_RV):
        return soft_cap_reference(logits_RV, cap)
    if size := logits_RV.numel():
        _soft_cap_kernel[(cdiv(size, _BLOCK),)](
            logits_RV, size, cap, BLOCK=_BLOCK, num_warps=4, **overlap_options(logits_RV)
        )
    return logits_RV


def soft_cap_reference(logits_RV: Tensor, cap: float) -> Tensor:
    """The same in PyTorch."""
    return logits_RV.copy_(torch.tanh(logits_RV.float() / cap) * cap)
