"""Which experts serve a token, and how much each counts: the likeliest few of a softmax over all of them.

Shape suffixes: T tokens, E experts, K experts of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit
def _route_kernel(
    logits_ptr, rows_ptr, experts_ptr, weights_ptr, E: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, NORMED: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program finds one token's experts, the likeliest first and the lower of equals."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0)
    columns, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + token.to(tl.int64) * E + columns, mask=columns < E, other=float("-inf"))
    logits = logits.to(tl.float32)
    likelihoods = tl.exp(logits - tl.max(logits))
    whole = tl.sum(likelihoods)
    experts = tl.full([BLOCK_K], E, tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    left = tl.where(columns < E, likelihoods, -1.0)
    for place in tl.static_range(K):
        most = tl.max(left)
        # Of numbers that are none, too, some expert: E - 1 at last.
        best = tl.min(tl.where(left == most, columns, E - 1))
        experts = tl.where(places == place, best, experts)
        weights = tl.where(places == place, most, weights)
        left = tl.where(columns == best, -1.0, left)
    weights /= tl.sum(weights) if NORMED else whole
    if HAS_ROWS and token >= tl.load(rows_ptr):
        experts = tl.full([BLOCK_K], E, tl.int32)
    tl.store(experts_ptr + token * K + places, experts, mask=places < K)
    tl.store(weights_ptr + token * K + places, weights.to(weights_ptr.dtype.element_ty), mask=places < K)


def route(logits_TE: Tensor, num_experts: int, *, normed: bool, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token's `num_experts` likeliest experts and their weights: int32 and the logits' type, [T, K] each.

    `normed`: the weights of a token's experts add up to one; else each is its share of all experts. `rows`: how many
    tokens there are in truth, int32 [1] on the device; those behind have the expert E, which nobody is. Softmax in
    fp32, weights rounded once; mutates nothing; graph-safe.
    """
    check_shape("logits", logits_TE, None, None)
    check_dtype("logits", logits_TE, *FLOATS)
    check_same("logits", logits_TE, logits_TE)
    T, E = logits_TE.shape
    if not 1 <= num_experts <= E:
        raise ValueError(f"num_experts: got {num_experts}, wanted 1 to {E}, as many as there are")
    if rows is not None:
        check_indices("rows", rows, logits_TE, 1)
    if not use_kernels(logits_TE):
        return route_reference(logits_TE, num_experts, normed=normed, rows=rows)
    experts_TK = torch.empty(T, num_experts, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(T, num_experts, dtype=logits_TE.dtype, device=logits_TE.device)
    if T:
        block = next_power_of_2(E)
        _route_kernel[(T,)](
            logits_TE, experts_TK if rows is None else rows, experts_TK, weights_TK, E=E, K=num_experts, BLOCK_E=block,
            BLOCK_K=next_power_of_2(num_experts), NORMED=normed, HAS_ROWS=rows is not None,
            num_warps=max(1, min(4, block // 256)), **overlap_options(logits_TE),
        )  # fmt: skip
    return experts_TK, weights_TK


def route_reference(
    logits_TE: Tensor, num_experts: int, *, normed: bool, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    shares_TE = logits_TE.float().softmax(1)
    weights_TE, experts_TE = shares_TE.sort(dim=1, descending=True, stable=True)
    weights_TK, experts_TK = weights_TE[:, :num_experts], experts_TE[:, :num_experts].int().contiguous()
    if normed:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    if rows is not None:
        experts_TK[int(rows) :] = logits_TE.shape[1]
    return experts_TK, weights_TK.contiguous().to(logits_TE.dtype)
