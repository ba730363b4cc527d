"""Numbers brought between two bounds that are on the device, and written among the columns of something else.

Shape suffixes: T tokens, N numbers of a row, M those of a row of what is written to.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit
def _clamp_into_kernel(
    x_ptr, bounds_ptr, out_ptr, N: tl.constexpr, M: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, ceil(N / BLOCK)): one program writes BLOCK numbers of a row."""
    low, high = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    x = tl.load(x_ptr + token * N + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.minimum(tl.maximum(x, low), high)
    tl.store(out_ptr + token * M + FIRST + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def clamp_into(x_TN: Tensor, bounds_2: Tensor, out_TM: Tensor, first: int = 0) -> Tensor:
    """Write `x_TN` between `bounds_2` (fp32, the lower and the upper) to the columns of `out_TM` from `first` on, and
    return that. In fp32, rounded once; graph-safe."""
    check_shape("x", x_TN, None, None)
    check_dtype("x", x_TN, *FLOATS)
    check_contiguous("x", x_TN)
    check_shape("bounds", bounds_2, 2)
    check_dtype("bounds", bounds_2, torch.float32)
    check_device("bounds", bounds_2, x_TN)
    T, N = x_TN.shape
    check_shape("out", out_TM, T, None)
    check_same("out", out_TM, x_TN)
    M = out_TM.shape[1]
    if not 0 <= first <= M - N:
        raise ValueError(f"first: got {first}, wanted 0 to {M - N}")
    if not use_kernels(x_TN):
        return clamp_into_reference(x_TN, bounds_2, out_TM, first)
    if x_TN.numel():
        _clamp_into_kernel[(T, cdiv(N, _BLOCK))](
            x_TN, bounds_2, out_TM, N=N, M=M, FIRST=first, BLOCK=_BLOCK, num_warps=4, **overlap_options(x_TN)
        )
    return out_TM


def clamp_into_reference(x_TN: Tensor, bounds_2: Tensor, out_TM: Tensor, first: int = 0) -> Tensor:
    """The same in PyTorch."""
    out_TM[:, first : first + x_TN.shape[1]] = x_TN.float().clamp(*bounds_2)
    return out_TM
