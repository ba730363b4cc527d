"""The gate of experts that keep it within limits: of gate and up columns in turns, to which each expert adds its own.

Shape suffixes: T tokens, K experts of a token, P pairs of both (T * K), E experts, F intermediate size; 2F gate and up
columns in turns.
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
def _clamped_gate_kernel(
    x_ptr, experts_ptr, bias_ptr, out_ptr, limit, slope, E, F: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (P, ceil(F / BLOCK)): one program owns BLOCK gates of one pair. Of an expert that is nobody it writes none:
    what is there may be anything."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    both = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    x = tl.load(x_ptr + pair * (2 * F) + both, mask=both < 2 * F, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + expert * (2 * F) + both, mask=both < 2 * F, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(x, (BLOCK, 2)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    y = (up + 1.0) * (gate / (1.0 + tl.exp(-slope * gate)))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + pair * F + columns, y.to(out_ptr.dtype.element_ty), mask=columns < F)


def clamped_gate(
    x_P2F: Tensor, experts_TK: Tensor, bias_E2F: Tensor | None, limit: float, slope: float, num_experts: int
) -> Tensor:
    """(min(max(up, -limit), limit) + 1) * gate * sigmoid(slope * gate), gate at most `limit`: [P, 2F] -> [P, F].

    `bias_E2F`: what is added first, by a pair's expert, which `experts_TK` has, P in all. Pairs whose expert is none of
    `num_experts` stay unwritten. fp32 inside; mutates nothing; graph-safe.
    """
    check_dtype("x", x_P2F, *FLOATS)
    check_shape("x", x_P2F, experts_TK.numel(), None)
    check_same("x", x_P2F, x_P2F)
    check_indices("experts", experts_TK, x_P2F, None, None)
    P, F = x_P2F.shape[0], x_P2F.shape[1] // 2
    if x_P2F.shape[1] % 2:
        raise ValueError(f"x: got {x_P2F.shape[1]} columns, wanted gate and up in turns: an even number")
    if bias_E2F is not None:
        check_shape("bias", bias_E2F, num_experts, 2 * F)
        check_same("bias", bias_E2F, x_P2F)
    out_PF = x_P2F.new_empty(P, F)
    if not use_kernels(x_P2F):
        there_P = ((experts_TK >= 0) & (experts_TK < num_experts)).flatten()
        own_P = experts_TK.flatten()[there_P]
        out_PF[there_P] = clamped_gate_reference(x_P2F[there_P], own_P, bias_E2F, limit, slope)
    elif P and F:
        _clamped_gate_kernel[(P, cdiv(F, _BLOCK))](
            x_P2F, experts_TK, x_P2F if bias_E2F is None else bias_E2F, out_PF, float(limit), float(slope), num_experts,
            F=F, BLOCK=_BLOCK, HAS_BIAS=bias_E2F is not None, num_warps=4, **overlap_options(x_P2F),
        )  # fmt: skip
    return out_PF


def clamped_gate_reference(
    x_P2F: Tensor, experts_P: Tensor, bias_E2F: Tensor | None, limit: float, slope: float
) -> Tensor:
    """The same in PyTorch, of pairs that all have an expert."""
    both_P2F = x_P2F.float() if bias_E2F is None else x_P2F.float() + bias_E2F.float()[experts_P]
    gate_PF, up_PF = both_P2F[:, 0::2].clamp(max=limit), both_P2F[:, 1::2].clamp(-limit, limit)
    return ((up_PF + 1) * gate_PF * torch.sigmoid(slope * gate_PF)).to(x_P2F.dtype)
