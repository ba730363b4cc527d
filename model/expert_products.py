"""What experts make of their tokens on the CPU, by oneDNN; elsewhere `matmul_experts.py` does that.

As in `linear.py`, whose reordered weights these are: so a token's bits do not depend on who else has its experts. Gate
and up rows stay in turns: gates of such columns are computed number by number, and no vector ends among them.

Shape suffixes as in `experts.py`; N output size, K reduced size of an expert's matrix, X tokens of one expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.linear import is_reordered, linear, reorder_for_cpu
from tercet.triton_kernels.clamped_gate import ClampedGate, clamped_gate_reference
from tercet.triton_kernels.gelu_and_mul import gelu_and_mul_reference
from tercet.triton_kernels.relu_squared import relu_squared_reference
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference


@dataclass(frozen=True)
class ReorderedExperts:
    """Each expert's matrix, for the CPU."""

    matrices_NK: tuple[Tensor, ...]


def reorder_experts(w_ENK: Tensor) -> Tensor | ReorderedExperts:
    """The matrices as products like them best on their device."""
    matrices = tuple(map(reorder_for_cpu, w_ENK))
    return ReorderedExperts(matrices) if is_reordered(matrices[0]) else w_ENK


def go_through_reordered(
    x_TD: Tensor, chosen_TK: Tensor, counts_TK: Tensor, gate_up: ReorderedExperts, down: ReorderedExperts,
    clamp: ClampedGate | None, bias_ED: Tensor | None, *, gated: bool = True, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """Each token's sum of what its experts make of it, by how much they count, in the order of their numbers: [T, D].

    Inputs as of `matmul_experts_gated` and `sum_experts`; who has an expert that is nobody gets zeros.
    """
    num_experts = len(down.matrices_NK)
    pairs_P = chosen_TK.flatten().argsort(stable=True)
    sizes = chosen_TK.flatten().bincount(minlength=num_experts + 1).tolist()
    counts_P1 = counts_TK.float().view(-1, 1)
    total_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert, pairs_X in enumerate(pairs_P.split(sizes)[:num_experts]):
        if not len(pairs_X):
            continue
        tokens_X = pairs_X // chosen_TK.shape[1]
        y_X2F = linear(x_TD[tokens_X], gate_up.matrices_NK[expert], None, deterministic=False)
        if not gated:
            gated_XF = relu_squared_reference(y_X2F)
        elif clamp is None:
            gate = gelu_and_mul_reference if gelu else silu_and_mul_reference
            gated_XF = gate(y_X2F[:, 0::2], y_X2F[:, 1::2])
        else:
            gated_XF = clamped_gate_reference(y_X2F, clamp.bias_E2F[expert], clamp.limit, clamp.slope)
        bias_D = None if bias_ED is None else bias_ED[expert]
        y_XD = linear(gated_XF, down.matrices_NK[expert], bias_D, deterministic=False)
        total_TD.index_add_(0, tokens_X, y_XD.float().mul_(counts_P1[pairs_X]))
    return total_TD.to(x_TD.dtype)
