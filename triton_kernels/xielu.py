"""What an MLP without a gate makes of its first product: xIELU, a parabola above zero and an exponential below, whose
curves are the layer's own.

Shape suffixes: T tokens, F intermediate size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import softplus

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _beyond_line(x):
    """exp(x) - 1 - x of numbers below zero, by a series where little would be left of the difference."""
    series = x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7)))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1 - x)


@triton.jit
def _xielu_kernel(x_ptr, curve_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, F / BLOCK): one program owns BLOCK numbers of one token."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = tl.program_id(0).to(tl.int64) * F + columns
    above, below = _softplus(tl.load(curve_ptr)), _softplus(tl.load(curve_ptr + 1))
    slope, most = tl.load(curve_ptr + 2), tl.load(curve_ptr + 3)
    let_next_start(PDL)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + places, mask=columns < F, other=0.0).to(tl.float32)
    kept = tl.minimum(x, most)
    curve = tl.where(x > 0, above * x * x, (_beyond_line(kept) + (kept - x)) * (slope + below))
    tl.store(out_ptr + places, (curve + slope * x).to(out_ptr.dtype.element_ty), mask=columns < F)


def xielu(x_TF: Tensor, curve_4: Tensor) -> Tensor:
    """[T, F] -> [T, F]. Mutates nothing; fp32 inside, rounded once; graph-safe.

    `curve_4`: fp32, as checkpoints have them: what the parabola's factor and, less the line's, the exponential's are
    the softplus of; the line's factor; and the most, below zero, that the exponential is taken of.
    """
    check_dtype("x", x_TF, *FLOATS)
    check_shape("x", x_TF, None, None)
    check_contiguous("x", x_TF)
    check_shape("curve", curve_4, 4)
    check_dtype("curve", curve_4, torch.float32)
    check_same("curve", curve_4, x_TF, torch.float32)
    if not use_kernels(x_TF):
        return xielu_reference(x_TF, curve_4)
    out_TF = torch.empty_like(x_TF)
    if x_TF.numel():
        T, F = x_TF.shape
        _xielu_kernel[(T, cdiv(F, _BLOCK))](
            x_TF, curve_4, out_TF, F=F, BLOCK=_BLOCK, num_warps=4, **overlap_options(x_TF)
        )  # fmt: skip
    return out_TF


def xielu_reference(x_TF: Tensor, curve_4: Tensor) -> Tensor:
    """The same in PyTorch."""
    (above, below), (slope, most) = softplus(curve_4[:2]), curve_4[2:]
    x_TF, dtype = x_TF.float(), x_TF.dtype
    exponential_TF = torch.expm1(torch.minimum(x_TF, most)) - x_TF
    curve_TF = torch.where(x_TF > 0, above * x_TF * x_TF, exponential_TF * (slope + below))
    out_TF: Tensor = (curve_TF + slope * x_TF).to(dtype)
    return out_TF
