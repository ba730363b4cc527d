"""A layer's block of many MLPs, of which each token goes through a few: which ones, and the sum of what they make.

Those that every token goes through are the last of them.

Every rank holds a part of each expert's inner size, as it does of a single MLP's, and routes all tokens by itself: the
same product of the same numbers on each, so all route alike. Knows no stream, no layer.

Shape suffixes: T tokens, D hidden size, L logits of a token, E experts, K experts of a token, P pairs of both, F inner
size of an expert on this rank, 2F gate and up rows in turns.
"""

import torch
from torch import Tensor

from tercet.model.blocks import Experts
from tercet.model.expert_products import ReorderedExperts, go_through_reordered
from tercet.model.linear import linear
from tercet.model.rank_weights import ExpertWeights
from tercet.triton_kernels.clamped_gate import ClampedGate
from tercet.triton_kernels.expert_work import deal_out
from tercet.triton_kernels.matmul_experts import (
    expert_tile,
    matmul_experts,
    matmul_experts_gated,
)
from tercet.triton_kernels.route import route
from tercet.triton_kernels.sum_experts import sum_experts


def go_through_experts(
    x_TD: Tensor, rows: Tensor | None, *, weights: ExpertWeights, experts: Experts, deterministic: bool,
    counts_biases: bool, router_TD: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What its experts make of each token, this rank's part: [T, D]. `rows`: see `linear.py`. `counts_biases`: those of
    what they end with count here; on one rank they do. `router_TD`: what chooses reads that, where it is not `x_TD`."""
    out_TL = None
    if experts.scored_in_float32:
        out_TL = x_TD.new_empty(len(x_TD), len(weights.router_LD), dtype=torch.float32)
    read_TD = x_TD if router_TD is None else router_TD
    logits_TL = linear(
        read_TD, weights.router_LD, weights.router_bias_L, out_TL, deterministic=deterministic, rows=rows
    )  # fmt: skip
    chosen_TK, counts_TK = route(
        logits_TL,
        experts.each,
        normed=experts.normed,
        bias_E=weights.bias_E,
        shares=experts.counts_by_share,
        scale=experts.scale,
        scales_E=weights.scales_E,
        shared=experts.shared,
        gated=experts.shared_gated,
        paired=len(weights.router_LD) == 2 * experts.count,
        groups=experts.groups,
        best_groups=experts.best_groups,
        rows=rows,
    )
    gate_up, down = weights.gate_up_E2FD, weights.down_EDF
    clamp = None
    if experts.clamp is not None:
        assert weights.gate_up_bias_E2F is not None
        clamp = ClampedGate(weights.gate_up_bias_E2F, experts.clamp.limit, experts.clamp.slope)
    bias_ED = weights.down_bias_ED if counts_biases else None
    if isinstance(gate_up, ReorderedExperts):
        assert isinstance(down, ReorderedExperts)
        return go_through_reordered(
            x_TD, chosen_TK, counts_TK, gate_up, down, clamp, bias_ED, gated=experts.gated,
            gelu=experts.beside,
        )  # fmt: skip
    assert not isinstance(down, ReorderedExperts)
    tile = expert_tile(
        chosen_TK.numel(),
        experts.all,
        gate_up,
        down,
        deterministic=deterministic,
        again=(len(x_TD) - 1) * experts.shared,
    )
    work = deal_out(chosen_TK, experts.all, tile)
    pairs_each = experts.each + experts.shared
    if experts.gated:
        gated_PF = matmul_experts_gated(x_TD, gate_up, work, pairs_each, clamp, gelu=experts.beside)
    else:
        gated_PF = matmul_experts(x_TD, gate_up, work, squared_each=pairs_each)
    return sum_experts(matmul_experts(gated_PF, down, work), counts_TK, rows, chosen_TK, bias_ED)
