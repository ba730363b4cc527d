"""The end of a token's way through its experts: the sum of what each made of it, by weight.

Shape suffixes: T tokens, K experts of a token, P pairs of both (T * K), D hidden size, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["E"], do_not_specialize_on_alignment=["E"])
def _sum_experts_kernel(
    x_ptr, weights_ptr, rows_ptr, experts_ptr, bias_ptr, out_ptr, E, K: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, ceil(D / BLOCK)): one program sums BLOCK columns of one token, expert after expert."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    if HAS_ROWS and token >= tl.load(rows_ptr):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(K):
        x = tl.load(x_ptr + (token * K + place) * D + columns, mask=columns < D, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(experts_ptr + token * K + place).to(tl.int64)
            known = (columns < D) & (expert >= 0) & (expert < E)
            x += tl.load(bias_ptr + expert * D + columns, mask=known, other=0.0).to(tl.float32)
        total = tl.fma(x, tl.load(weights_ptr + token * K + place).to(tl.float32), total)
    tl.store(out_ptr + token * D + columns, total.to(out_ptr.dtype.element_ty), mask=columns < D)


def sum_experts(
    x_PD: Tensor, weights_TK: Tensor, rows: Tensor | None = None, experts_TK: Tensor | None = None,
    bias_ED: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each token's sum of its pairs' rows, by weight: [T * K, D] and [T, K] -> [T, D]. fp32 inside; graph-safe.

    Weights are of x's type or fp32. `rows`: how many tokens there are in truth, int32 [1] on the device; those behind
    are left out. `bias_ED`: what is added to a pair's row first, by its expert, which `experts_TK` has.
    """
    check_dtype("weights", weights_TK, *FLOATS)
    check_shape("weights", weights_TK, None, None)
    check_shape("x", x_PD, weights_TK.numel(), None)
    check_same("x", x_PD, x_PD)
    check_same("weights", weights_TK, x_PD, torch.float32)
    if rows is not None:
        check_indices("rows", rows, weights_TK, 1)
    (T, K), D = weights_TK.shape, x_PD.shape[1]
    if bias_ED is not None:
        if experts_TK is None:
            raise ValueError("experts: got none, wanted those whose biases are added")
        check_shape("bias", bias_ED, None, D)
        check_same("bias", bias_ED, x_PD)
        check_indices("experts", experts_TK, weights_TK, T, K)
    if not use_kernels(x_PD):
        return sum_experts_reference(x_PD, weights_TK, experts_TK, bias_ED)
    out_TD = x_PD.new_empty(T, D)
    if out_TD.numel():
        _sum_experts_kernel[(T, cdiv(D, _BLOCK))](
            x_PD, weights_TK, weights_TK if rows is None else rows, weights_TK if bias_ED is None else experts_TK,
            x_PD if bias_ED is None else bias_ED, out_TD, 0 if bias_ED is None else len(bias_ED), K=K, D=D,
            BLOCK=_BLOCK, HAS_ROWS=rows is not None, HAS_BIAS=bias_ED is not None, num_warps=4,
            **overlap_options(x_PD),
        )  # fmt: skip
    return out_TD


def sum_experts_reference(
    x_PD: Tensor, weights_TK: Tensor, experts_TK: Tensor | None = None, bias_ED: Tensor | None = None
) -> Tensor:
    """The same in PyTorch."""
    x_TKD = x_PD.view(*weights_TK.shape, -1).float()
    if experts_TK is not None and bias_ED is not None:
        known = (experts_TK >= 0) & (experts_TK < len(bias_ED))
        x_TKD = x_TKD + torch.where(known[..., None], bias_ED.float()[experts_TK.clamp(0, len(bias_ED) - 1)], 0.0)
    return (x_TKD * weights_TK.float()[:, :, None]).sum(1).to(x_PD.dtype)
