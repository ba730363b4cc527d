"""Log-probabilities of chosen tokens and of the likeliest ones, from logits, without a sort.

A logit that is no number counts as -inf, as in `sample.py`.

Shape suffixes: R rows, V vocabulary, K likeliest tokens, W words of a row, P parts of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.candidates import (
    UNUSED_BITS,
    empty_candidates,
    ids_of,
    leave_candidates,
    load_candidates,
    load_logits,
    order_key,
    part_groups,
)
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import next_power_of_2

_BLOCK = 8192


@triton.jit
def _logit_of(row_ptr, token, V: tl.constexpr):
    """A row's token's; -inf for what is no token."""
    return load_logits(row_ptr, tl.where(token >= 0, token, V), V)


@triton.jit
def _part_kernel(
    logits_ptr, token_ids_ptr, ids_ptr, counts_ptr, from_ptr, stats_ptr, above_ptr,
    STRIDE: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Grid (R, P): one program holds a part of a row, and leaves its candidates, the largest, the sum of exponentials
    below that, and how many are above the row's token."""
    row, part = tl.program_id(0), tl.program_id(1)
    cell = row * tl.num_programs(1) + part
    row_ptr = logits_ptr + row.to(tl.int64) * STRIDE
    groups = part_groups(part)
    x = load_logits(row_ptr, ids_of(groups), V)
    largest = tl.max(x)
    tl.store(stats_ptr + cell * 2, largest)
    tl.store(stats_ptr + cell * 2 + 1, tl.sum(tl.where(x > float("-inf"), tl.exp(x - largest), 0.0)))
    tl.store(above_ptr + cell, tl.sum((x > _logit_of(row_ptr, tl.load(token_ids_ptr + row), V)).to(tl.int32)))
    leave_candidates(groups, order_key(x) >> SHIFT, ids_ptr, counts_ptr, from_ptr, cell, SHIFT)


@triton.jit
def _best_behind(row_ptr, last, last_id, V: tl.constexpr, BLOCK: tl.constexpr):
    """Of a whole row the largest behind the last one, in the order of logits and then of ids, and its id."""
    best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], V, tl.int32)
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, ids, V)
        left = (ids < V) & ((x < last) | ((x == last) & (ids > last_id)))
        one = tl.max(tl.where(left, x, float("-inf")))
        one_id = tl.min(tl.where(left & (x == one), ids, V))
        if (one_id < V) & ((one > best) | (best_id == V)):
            best, best_id = one, one_id
    return best, best_id


@triton.jit
def _merge_kernel(
    logits_ptr, token_ids_ptr, ids_ptr, counts_ptr, from_ptr, stats_ptr, above_ptr, words_ptr,
    STRIDE: tl.constexpr, V: tl.constexpr, SHIFT: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one program makes one row's words of what its parts left. Only where so many logits are equal that
    candidates are fewer than K, the whole row is read, once for each."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * STRIDE
    words_ptr += row * (2 + 2 * K)
    parts = tl.arange(0, BLOCK_P)
    cells = row * P + parts
    largest_P = tl.load(stats_ptr + cells * 2, mask=parts < P, other=float("-inf"))
    sums_P = tl.load(stats_ptr + cells * 2 + 1, mask=parts < P, other=0.0)
    largest = tl.max(largest_P)
    log_sum = largest + tl.log(tl.sum(tl.where(sums_P > 0, sums_P * tl.exp(largest_P - largest), 0.0)))
    token = tl.load(token_ids_ptr + row)
    above = tl.sum(tl.load(above_ptr + cells, mask=parts < P, other=0))
    tl.store(words_ptr, (_logit_of(row_ptr, token, V) - log_sum).to(tl.int32, bitcast=True))
    tl.store(words_ptr + 1, tl.where((token >= 0) & (token < V), above + 1, -1))
    if K > 0:
        ids, start = load_candidates(ids_ptr, counts_ptr, from_ptr, row, P, BLOCK_P)
        x = load_logits(row_ptr, ids, V)
        enough = tl.sum((order_key(x) >> SHIFT >= start).to(tl.int32)) >= K
        best = tl.full([], float("inf"), tl.float32)
        best_id = tl.full([], -1, tl.int32)
        for k in range(K):
            if enough:
                best = tl.max(x)
                best_id = tl.min(tl.where(x == best, ids, V))
                x = tl.where(ids == best_id, float("-inf"), x)
            else:
                best, best_id = _best_behind(row_ptr, best, best_id, V, BLOCK)
            tl.store(words_ptr + 2 + k, best_id)
            tl.store(words_ptr + 2 + K + k, (best - log_sum).to(tl.int32, bitcast=True))


def log_probabilities(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> Tensor:
    """What is to be told of each row's token, packed as int32 words [R, 2 + 2 `num_top`]: see `unpack`.

    Sums in fp32; a row's words do not depend on the others. Graph-safe.
    """
    check_dtype("logits", logits_RV, *FLOATS)
    check_shape("logits", logits_RV, None, None)
    R, V = logits_RV.shape
    if R and logits_RV.stride(1) != 1:
        raise ValueError(f"logits: got strides {list(logits_RV.stride())}, wanted rows without gaps")
    check_shape("token_ids", token_ids_R, R)
    check_dtype("token_ids", token_ids_R, torch.int32)
    check_contiguous("token_ids", token_ids_R)
    check_device("token_ids", token_ids_R, logits_RV)
    if not 0 <= num_top <= V:
        raise ValueError(f"num_top is {num_top}; want 0 to {V}")
    if not use_kernels(logits_RV):
        return log_probabilities_reference(logits_RV, token_ids_R, num_top)
    words_RW = torch.empty(R, 2 + 2 * num_top, dtype=torch.int32, device=logits_RV.device)
    if R:
        candidates = empty_candidates(R, V, logits_RV.device)
        P = candidates.counts_RP.shape[1]
        stats = torch.empty(R, P, 2, dtype=torch.float32, device=logits_RV.device)
        left = logits_RV, token_ids_R, *candidates, stats, torch.empty_like(candidates.counts_RP)
        sizes = {"STRIDE": logits_RV.stride(0), "V": V, "SHIFT": UNUSED_BITS[logits_RV.dtype]}
        _part_kernel[(R, P)](*left, **sizes, num_warps=8, maxnreg=64)
        _merge_kernel[(R,)](
            *left, words_RW, **sizes, K=num_top, P=P, BLOCK_P=next_power_of_2(P), BLOCK=_BLOCK, num_warps=16
        )
    return words_RW


def unpack(words_RW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the words: log-probability (fp32) and rank (1: likeliest; int32) of each row's token, -inf and -1 for a
    token outside the vocabulary; ids [R, K] and log-probabilities [R, K] of the likeliest, equal ones by id."""
    num_top = words_RW.shape[1] // 2 - 1
    chosen_R = words_RW[:, 0].view(torch.float32)
    return chosen_R, words_RW[:, 1], words_RW[:, 2 : 2 + num_top], words_RW[:, 2 + num_top :].view(torch.float32)


def log_probabilities_reference(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> Tensor:
    """The same in PyTorch."""
    log_RV = logits_RV.float().masked_fill(logits_RV.isnan(), float("-inf")).log_softmax(1)
    inside_R = (token_ids_R >= 0) & (token_ids_R < logits_RV.shape[1])
    chosen_R = log_RV.gather(1, torch.where(inside_R, token_ids_R, 0).long()[:, None]).squeeze(1)
    ranks_R = torch.where(inside_R, (log_RV > chosen_R[:, None]).sum(1).int() + 1, -1)
    # A stable sort keeps equal ones in the order of their ids.
    sorted_RV, ids_RV = log_RV.sort(dim=1, descending=True, stable=True)
    chosen_R = chosen_R.masked_fill(~inside_R, float("-inf"))
    top_RK = sorted_RV[:, :num_top].contiguous().view(torch.int32)
    return torch.cat([chosen_R.view(torch.int32)[:, None], ranks_R[:, None], ids_RV[:, :num_top].int(), top_RK], 1)
