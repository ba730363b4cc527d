"""Which experts serve a token, and how much each counts: the likeliest few, and those that serve every token.

Shape suffixes: T tokens, L logits of a token, E experts to choose from, K experts of a token, G groups of experts, S
experts of a group, B groups that a token's are chosen from.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2

_LITTLE = 1e-20
"""Keeps a sum of sigmoids from being nothing, as models were trained with it."""


@triton.jit
def _in_best_groups(choice, GROUPS: tl.constexpr, BEST: tl.constexpr, BIASED: tl.constexpr, BLOCK_S: tl.constexpr):
    """Which experts, whose groups are side by side in blocks, are in the best of these; the lower of equals."""
    BLOCK_G: tl.constexpr = choice.shape[0] // BLOCK_S
    parts, places, groups = choice.reshape(BLOCK_G, BLOCK_S), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_G)
    left = tl.max(parts, 1)
    if BIASED:  # the best two count, which may be equals
        first = tl.min(tl.where(parts == left[:, None], places[None, :], BLOCK_S), 1)
        left += tl.max(tl.where(places[None, :] == first[:, None], float("-inf"), parts), 1)
    found = tl.zeros([BLOCK_G], tl.int32)
    for _ in tl.static_range(BEST):
        # Of numbers that are none, too, some group.
        best = tl.min(tl.where(left == tl.max(left), groups, GROUPS - 1))
        found = tl.where(groups == best, 1, found)
        left = tl.where(groups == best, float("-inf"), left)
    return (tl.broadcast_to(found[:, None], BLOCK_G, BLOCK_S) > 0).reshape(BLOCK_G * BLOCK_S)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, scales_ptr, rows_ptr, experts_ptr, weights_ptr, scale, E: tl.constexpr, EACH: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, BIASED: tl.constexpr, SIGMOIDS: tl.constexpr,
    GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr, LITTLE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, NORMED: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program finds one token's experts, the likeliest first and the lower of equals."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0)
    logits_ptr += token.to(tl.int64) * (E * (1 + PAIRED) + GATED)
    columns, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    if GROUPS > 1:  # each has a block of its own
        in_group = columns % BLOCK_S
        columns = tl.where(in_group < E // GROUPS, columns // BLOCK_S * (E // GROUPS) + in_group, E)
    logits = tl.load(logits_ptr + columns, mask=columns < E, other=float("-inf")).to(tl.float32)
    if PAIRED:
        logits += tl.load(logits_ptr + E + columns, mask=columns < E, other=0.0).to(tl.float32)
    scores = 1.0 / (1.0 + tl.exp(-logits)) if SIGMOIDS else tl.exp(logits - tl.max(logits))
    left = scores
    if BIASED:
        if not SIGMOIDS:
            scores /= tl.sum(scores)
        left = scores + tl.load(bias_ptr + columns, mask=columns < E, other=0.0)
    experts = tl.full([BLOCK_K], E, tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    left = tl.where(columns < E, left, float("-inf"))
    if GROUPS > 1:
        left = tl.where(_in_best_groups(left, GROUPS, BEST_GROUPS, BIASED, BLOCK_S), left, float("-inf"))
    for place in tl.static_range(EACH):
        most = tl.max(left)
        # Of numbers that are none, too, some expert: E - 1 at last.
        best = tl.min(tl.where(left == most, columns, E - 1))
        experts = tl.where(places == place, best, experts)
        weights = tl.where(places == place, tl.sum(tl.where(columns == best, scores, 0.0)), weights)
        left = tl.where(columns == best, float("-inf"), left)
    if NORMED:
        weights /= tl.sum(weights) + LITTLE if SIGMOIDS else tl.sum(weights)
    elif not BIASED:
        weights /= tl.sum(scores)
    weights *= scale
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + experts, mask=experts < E, other=0.0)
    if SHARED > 0:
        own = 1.0
        if GATED:
            own = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + E).to(tl.float32)))
        is_shared = places >= EACH
        experts = tl.where(is_shared, E + places - EACH, experts)
        weights = tl.where(is_shared, own, weights)
    if HAS_ROWS and token >= tl.load(rows_ptr):
        experts = tl.full([BLOCK_K], E + SHARED, tl.int32)
    stored = places < EACH + SHARED
    tl.store(experts_ptr + token * (EACH + SHARED) + places, experts, mask=stored)
    tl.store(weights_ptr + token * (EACH + SHARED) + places, weights.to(weights_ptr.dtype.element_ty), mask=stored)


def route(
    logits_TL: Tensor,
    each: int,
    *,
    normed: bool,
    bias_E: Tensor | None = None,
    shares: bool = False,
    scale: float = 1.0,
    scales_E: Tensor | None = None,
    shared: int = 0,
    gated: bool = False,
    paired: bool = False,
    groups: int = 1,
    best_groups: int = 1,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's `each` likeliest experts, then the `shared` that serve every token, numbered from E on, and their
    weights: int32 and the logits' type, [T, K] each.

    What counts is an expert's share in a softmax of all; with a bias (fp32, [E]) its sigmoid, unless `shares` says that
    it is the share then, too, and the bias is added for the choice alone. `normed`: the weights of a token's likeliest
    add up to one; `scale` multiplies them, and so do `scales_E`, each an expert's (fp32, [E]). `gated`: one logit more
    stands behind the experts', whose sigmoid the shared ones weigh; else one. `paired`: an expert's logit is the sum of
    two, the second of all behind the first of all. `groups`: equal parts of the experts, side by side; a token's are
    all of the `best_groups` best parts, each as good as its best expert, or with a bias as its best two together.
    `rows`: how many tokens there are in truth, int32 [1] on the device; those behind have an expert that is nobody.
    fp32 inside, weights rounded once; mutates nothing; graph-safe.
    """
    check_shape("logits", logits_TL, None, None)
    check_dtype("logits", logits_TL, *FLOATS)
    check_same("logits", logits_TL, logits_TL)
    if paired and (gated or logits_TL.shape[1] % 2):
        raise ValueError(f"logits: got {logits_TL.shape[1]} of a token, wanted pairs and nothing beside them")
    T, E = logits_TL.shape[0], (logits_TL.shape[1] - gated) // (1 + paired)
    if not 1 <= each <= E:
        raise ValueError(f"each: got {each}, wanted 1 to {E}, as many as there are")
    if shared < gated:
        raise ValueError(f"shared: got {shared}, wanted at least 1, whose weight the last logit is")
    _check_groups(E, each, groups, best_groups, biased=bias_E is not None)
    for name, numbers_E in (("bias", bias_E), ("scales", scales_E)):
        if numbers_E is not None:
            check_shape(name, numbers_E, E)
            check_dtype(name, numbers_E, torch.float32)
            check_same(name, numbers_E, logits_TL, torch.float32)
    if rows is not None:
        check_indices("rows", rows, logits_TL, 1)
    if not use_kernels(logits_TL):
        return route_reference(
            logits_TL,
            each,
            normed=normed,
            bias_E=bias_E,
            shares=shares,
            scale=scale,
            scales_E=scales_E,
            shared=shared,
            gated=gated,
            paired=paired,
            groups=groups,
            best_groups=best_groups,
            rows=rows,
        )
    experts_TK = torch.empty(T, each + shared, dtype=torch.int32, device=logits_TL.device)
    weights_TK = torch.empty(T, each + shared, dtype=logits_TL.dtype, device=logits_TL.device)
    if T:
        if best_groups == groups:
            groups = best_groups = 1
        block_s = next_power_of_2(E // groups)
        block = block_s * next_power_of_2(groups)
        _route_kernel[(T,)](
            logits_TL, logits_TL if bias_E is None else bias_E, scales_E, experts_TK if rows is None else rows,
            experts_TK, weights_TK, float(scale), E=E, EACH=each, SHARED=shared, GATED=gated, PAIRED=paired,
            BIASED=bias_E is not None, SIGMOIDS=bias_E is not None and not shares, GROUPS=groups,
            BEST_GROUPS=best_groups, LITTLE=_LITTLE, BLOCK_E=block, BLOCK_S=block_s,
            BLOCK_K=next_power_of_2(each + shared), NORMED=normed, HAS_ROWS=rows is not None,
            num_warps=max(1, min(4, block // 256)), **overlap_options(logits_TL),
        )  # fmt: skip
    return experts_TK, weights_TK


def _check_groups(num_experts: int, each: int, groups: int, best_groups: int, *, biased: bool) -> None:
    if groups < 1 or num_experts % groups:
        raise ValueError(f"groups: got {groups}, wanted a divisor of {num_experts}, how many experts there are")
    if not 1 <= best_groups <= groups:
        raise ValueError(f"best_groups: got {best_groups}, wanted 1 to {groups}, as many as there are")
    size = num_experts // groups
    if best_groups < groups and size < 1 + biased:
        raise ValueError(f"groups: got {groups} of {size} expert each, wanted two at least, whose sum is compared")
    if each > best_groups * size:
        raise ValueError(f"each: got {each}, wanted 1 to {best_groups * size}, as many as {best_groups} groups have")


def route_reference(
    logits_TL: Tensor,
    each: int,
    *,
    normed: bool,
    bias_E: Tensor | None = None,
    shares: bool = False,
    scale: float = 1.0,
    scales_E: Tensor | None = None,
    shared: int = 0,
    gated: bool = False,
    paired: bool = False,
    groups: int = 1,
    best_groups: int = 1,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    logits_TE, own_T1 = logits_TL.float().split((logits_TL.shape[1] - gated, int(gated)), 1)
    if paired:
        first_TE, second_TE = logits_TE.chunk(2, 1)
        logits_TE = first_TE + second_TE
    T, E = logits_TE.shape
    sigmoids = bias_E is not None and not shares
    scores_TE = logits_TE.sigmoid() if sigmoids else logits_TE.softmax(1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if best_groups < groups:
        choice_TGS = choice_TE.view(T, groups, E // groups)
        goodness_TG = choice_TGS.amax(2) if bias_E is None else choice_TGS.topk(2).values.sum(2)
        best_TB = goodness_TG.sort(dim=1, descending=True, stable=True).indices[:, :best_groups]
        is_best_TG = torch.zeros_like(goodness_TG, dtype=torch.bool).scatter_(1, best_TB, True)
        choice_TE = choice_TGS.masked_fill(~is_best_TG[:, :, None], float("-inf")).view(T, E)
    chosen_TK = choice_TE.sort(dim=1, descending=True, stable=True).indices[:, :each]
    weights_TK = scores_TE.gather(1, chosen_TK)
    if normed:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + (_LITTLE if sigmoids else 0.0))
    own_T1 = own_T1.sigmoid() if gated else logits_TE.new_ones(T, 1)
    if scales_E is not None:
        weights_TK = weights_TK * scales_E[chosen_TK]
    weights_TK = torch.cat((weights_TK * scale, own_T1.expand(T, shared)), 1)
    shared_TK = torch.arange(E, E + shared, device=logits_TE.device).expand(T, shared)
    experts_TK = torch.cat((chosen_TK, shared_TK), 1).int()
    if rows is not None:
        experts_TK[int(rows) :] = E + shared
    return experts_TK, weights_TK.to(logits_TL.dtype)
