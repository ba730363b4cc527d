"""Which tokens top-k, top-p and min-p leave, as one threshold per row: found by bisection, without a sort.

A logit is compared as an integer that orders like the float, so that bisection ends at a value, not near one: the
threshold is the largest key at which enough tokens (top-k) or enough probability (top-p) still lie at or above it.
top-p counts among what top-k leaves; min-p is relative to the likeliest token. Ties with the threshold are allowed.

It is sought among the row's candidates (`candidates.py`). Where these are too few, for a thousand tokens or for
probability spread over as many, the whole row is read, again and again.

Shape suffixes: R rows of a step, V vocabulary, P parts of it, C candidates of a part, N rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.candidates import (
    UNUSED_BITS,
    empty_candidates,
    first_possible_key,
    ids_of,
    leave_candidates,
    load_candidates,
    load_logits,
    order_key,
    part_groups,
)
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, SlotTable
from tercet.triton_kernels.tiles import next_power_of_2

EVERYTHING: tl.constexpr = tl.constexpr(-(2**31))
"""The key of a row that allows all."""

_SEARCH_BLOCK = 8192


@triton.jit
def masked_logits(row_ptr, token_ids, stop_ptr, banned, V: tl.constexpr, E: tl.constexpr):
    """As `load_logits`, and -inf, where `banned`, for the row's stop ids."""
    x = load_logits(row_ptr, token_ids, V)
    if banned:
        for e in tl.static_range(E):
            x = tl.where(token_ids == tl.load(stop_ptr + e), float("-inf"), x)
    return x


@triton.jit
def _is_limited(slot, position, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, smallest_temperature, S, V):
    """Whether the row draws, and not from everything."""
    limited = False
    if (position >= 0) & (slot >= 0) & (slot < S):
        top_k = tl.load(top_k_ptr + slot)
        by_some = ((top_k > 0) & (top_k < V)) | (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
        limited = by_some & (tl.load(temperature_ptr + slot) >= smallest_temperature)
    return limited


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _candidates_kernel(
    logits_ptr, slots_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, min_length_ptr,
    stop_ids_ptr, ids_ptr, counts_ptr, from_ptr, largest_ptr, mass_ptr, smallest_temperature, S,
    STRIDE: tl.constexpr, V: tl.constexpr, E: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, P): one program leaves the candidates of a part of a row, its largest logit, and, for top-p alone, the
    sum of exp relative to that. Rows that sample nothing, are greedy, or allow everything leave nothing."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    if _is_limited(slot, position, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, smallest_temperature, S, V):
        row_ptr = logits_ptr + row.to(tl.int64) * STRIDE
        banned = position < tl.load(min_length_ptr + slot)
        groups = part_groups(part)
        x = masked_logits(row_ptr, ids_of(groups), stop_ids_ptr + slot * E, banned, V, E)
        cell = row * tl.num_programs(1) + part
        leave_candidates(groups, order_key(x) >> SHIFT, ids_ptr, counts_ptr, from_ptr, cell, SHIFT)
        largest = tl.max(x)
        tl.store(largest_ptr + cell, largest)
        top_k = tl.load(top_k_ptr + slot)
        if (top_k <= 0) | (top_k >= V):
            weight = tl.exp((x - largest) * (1.0 / tl.load(temperature_ptr + slot)))
            tl.store(mass_ptr + cell, tl.sum(tl.where(x > float("-inf"), weight, 0.0)))


@triton.jit
def _search_found(key, weight, low, high, wanted):
    """The largest shifted key from `low` (which reaches `wanted`) to `high` (which does not) at or above which the
    weights reach it."""
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0.0)) >= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _search_row(
    row_ptr, stop_ptr, banned, low, high, wanted, largest, inverse_temperature,
    V: tl.constexpr, E: tl.constexpr, SHIFT: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same among all logits of a row; their number (COUNT), or the sum of their exp. Three pivots a pass."""
    while high - low > 1:
        span = high - low
        pivot_1 = low + tl.maximum(span // 4, 1)
        pivot_2 = tl.maximum(low + span // 2, pivot_1)
        pivot_3 = tl.maximum(low + span * 3 // 4, pivot_2)
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            token_ids = start + tl.arange(0, BLOCK)
            x = masked_logits(row_ptr, token_ids, stop_ptr, banned, V, E)
            key = order_key(x) >> SHIFT
            weight = (token_ids < V).to(tl.float32) if COUNT else tl.exp((x - largest) * inverse_temperature)
            sum_1 += tl.where(key >= pivot_1.to(tl.int32), weight, 0.0)
            sum_2 += tl.where(key >= pivot_2.to(tl.int32), weight, 0.0)
            sum_3 += tl.where(key >= pivot_3.to(tl.int32), weight, 0.0)
        if tl.sum(sum_3) >= wanted:
            low = pivot_3
        elif tl.sum(sum_2) >= wanted:
            low, high = pivot_2, pivot_3
        elif tl.sum(sum_1) >= wanted:
            low, high = pivot_1, pivot_2
        else:
            high = pivot_1
    return low


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _threshold_kernel(
    logits_ptr, slots_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, min_length_ptr,
    stop_ids_ptr, ids_ptr, counts_ptr, from_ptr, largest_ptr, mass_ptr, threshold_ptr, smallest_temperature, S,
    STRIDE: tl.constexpr, V: tl.constexpr, E: tl.constexpr, SHIFT: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one program searches among its row's candidates until top-k, then top-p, have their keys.

    From the highest key on from which some part has left all, the candidates are all there are. A threshold below it is
    sought among the whole row. For top-p what lies under the largest by temperature * log(V / (1 - p)) needs no look:
    it has, all together, less than the share 1 - p.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    threshold = tl.full([], EVERYTHING, tl.int32)
    if _is_limited(slot, position, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, smallest_temperature, S, V):
        temperature = tl.load(temperature_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.load(min_p_ptr + slot)
        inverse_temperature = 1.0 / temperature
        row_ptr = logits_ptr + row.to(tl.int64) * STRIDE
        stop_ptr = stop_ids_ptr + slot * E
        banned = position < tl.load(min_length_ptr + slot)
        part = tl.arange(0, BLOCK_P)
        cell = row * P + part
        tops = tl.load(largest_ptr + cell, mask=part < P, other=float("-inf"))
        largest = tl.max(tops)
        token_ids, start = load_candidates(ids_ptr, counts_ptr, from_ptr, row, P, BLOCK_P)
        x = masked_logits(row_ptr, token_ids, stop_ptr, banned, V, E)
        key = order_key(x) >> SHIFT
        whole = start.to(tl.int64)
        low = tl.full([], -(2 ** (31 - SHIFT)), tl.int64)
        high = (order_key(largest) >> SHIFT).to(tl.int64) + 1
        by_k = (top_k > 0) & (top_k < V)
        if by_k:
            one = tl.full(key.shape, 1.0, tl.float32)
            if tl.sum(tl.where(key >= whole.to(tl.int32), one, 0.0)) >= top_k:
                low = _search_found(key, one, whole, high, top_k)
            elif whole > first_possible_key(SHIFT):  # else all that are possible are fewer than k
                low = _search_row(
                    row_ptr, stop_ptr, banned, low, whole, top_k, largest, inverse_temperature, V, E, SHIFT, True, BLOCK
                )  # fmt: skip
        if top_p < 1.0:
            weight = tl.exp((x - largest) * inverse_temperature)
            total = 0.0
            if low >= whole:
                total = tl.sum(tl.where(key >= low.to(tl.int32), weight, 0.0))
            elif by_k:
                kept = tl.zeros([BLOCK], tl.float32)
                for first in range(0, V, BLOCK):
                    y = masked_logits(row_ptr, first + tl.arange(0, BLOCK), stop_ptr, banned, V, E)
                    is_kept = (order_key(y) >> SHIFT) >= low.to(tl.int32)
                    kept += tl.where(is_kept, tl.exp((y - largest) * inverse_temperature), 0.0)
                total = tl.sum(kept)
            else:
                mass = tl.load(mass_ptr + cell, mask=part < P, other=0.0)
                total = tl.sum(tl.where(mass > 0.0, mass * tl.exp((tops - largest) * inverse_temperature), 0.0))
            least = tl.maximum(low, whole)
            if tl.sum(tl.where(key >= least.to(tl.int32), weight, 0.0)) >= top_p * total:
                low = _search_found(key, weight, least, high, top_p * total)
            else:
                reach = tl.log(V / (1.0 - top_p)) + 0.1  # more than rounding can take away
                bound = (order_key(largest - temperature * reach) >> SHIFT).to(tl.int64)
                low = _search_row(
                    row_ptr, stop_ptr, banned, tl.maximum(low, bound), least, top_p * total, largest,
                    inverse_temperature, V, E, SHIFT, False, BLOCK,
                )  # fmt: skip
        threshold = (low << SHIFT).to(tl.int32)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, order_key(largest + temperature * tl.log(min_p)))
    tl.store(threshold_ptr + row, threshold)


def launch_thresholds(
    logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, smallest_temperature: float
) -> Tensor:
    """The key of the smallest logit that each row allows, int32 [R]; EVERYTHING where there is no limit."""
    R, V = logits_RV.shape
    candidates = empty_candidates(R, V, logits_RV.device)
    P = candidates.counts_RP.shape[1]
    largest_RP, mass_RP = (torch.empty(R, P, dtype=torch.float32, device=logits_RV.device) for _ in range(2))
    thresholds_R = torch.empty(R, dtype=torch.int32, device=logits_RV.device)
    rows = (
        logits_RV, slots_R, positions_R, table.temperature_S, table.top_k_S, table.top_p_S, table.min_p_S,
        table.min_length_S, table.stop_ids_SE, *candidates, largest_RP, mass_RP,
    )  # fmt: skip
    sizes = {
        "STRIDE": logits_RV.stride(0), "V": V, "E": MAX_STOP_IDS, "SHIFT": UNUSED_BITS[logits_RV.dtype],
        **overlap_options(logits_RV),
    }  # fmt: skip
    S = table.token_ids_SL.shape[0]
    _candidates_kernel[(R, P)](*rows, smallest_temperature, S, **sizes, num_warps=8, maxnreg=64)
    _threshold_kernel[(R,)](
        *rows, thresholds_R, smallest_temperature, S, **sizes, P=P, BLOCK_P=next_power_of_2(P), BLOCK=_SEARCH_BLOCK,
        num_warps=16,
    )  # fmt: skip
    return thresholds_R


def threshold_reference(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> Tensor:
    """The smallest logit that each row allows, by a sort: [N] fp32. top_k 0, top_p 1 and min_p 0 allow all."""
    V = logits_NV.shape[1]
    sorted_NV = logits_NV.float().sort(dim=1, descending=True).values
    k_N = torch.where((top_k_N > 0) & (top_k_N < V), top_k_N, V).long()
    kth_N = sorted_NV.gather(1, k_N[:, None] - 1).squeeze(1)
    scaled_NV = (sorted_NV.double() - sorted_NV[:, :1]) / temperature_N[:, None]
    mass_NV = scaled_NV.masked_fill_(sorted_NV < kth_N[:, None], float("-inf")).softmax(1).cumsum(1)
    # The first index at which the mass reaches p is the number of indices before that.
    index_N = (mass_NV < top_p_N[:, None]).sum(1).clamp(max=V - 1)
    pth_N = sorted_NV.gather(1, index_N[:, None]).squeeze(1)
    pth_N = torch.where(top_p_N < 1, torch.maximum(pth_N, kth_N), kth_N)
    return torch.maximum(pth_N, sorted_NV[:, 0] + temperature_N * min_p_N.log())
