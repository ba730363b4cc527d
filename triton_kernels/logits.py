"""What requests ask of their logits before sampling: penalties, biases, and masks of what a grammar allows.

On a copy in fp32 that `widen` makes, and then in place. Rows whose slot asks for nothing are left alone. Penalties
change only the tokens that a row has seen: they are counted in memory of which nothing else is read. Counts are
integers, so atomics on them give the same sums in any order.

Shape suffixes: R rows of a step, V vocabulary, S slots, L positions of a slot, K biases of a slot, W words of a mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)
"""Bit of a count that says: the token is in the prompt. The rest counts its generated occurrences."""

_BLOCK = 1024
_POSITIONS = 2048
_SIZES = {"do_not_specialize": ["S", "L"], "do_not_specialize_on_alignment": ["S", "L"]}


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _widen_kernel(
    logits_ptr, wide_ptr, slots_ptr, mask_ptr, S, STRIDE: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles of the vocabulary): one program copies BLOCK logits of one row, those that its slot allows."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row)
    x = tl.load(logits_ptr + row * STRIDE + token, mask=token < V, other=0.0).to(tl.float32)
    known = (token < V) & (slot >= 0) & (slot < S)
    word = tl.load(mask_ptr + slot.to(tl.int64) * W + token // 32, mask=known, other=-1)
    x = tl.where(((word >> (token % 32)) & 1) == 0, float("-inf"), x)
    tl.store(wide_ptr + row * V + token, x, mask=token < V)


@triton.jit
def _seen(ids_ptr, counts_ptr, start, length, V: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of a slot from `start` on, their tokens, where these are counted, and which of them are tokens."""
    position = start + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + position, mask=position < length, other=-1)
    return position, token, counts_ptr + token, (token >= 0) & (token < V)


@triton.jit(**_SIZES)
def _penalize_kernel(
    logits_ptr, counts_ptr, slots_ptr, positions_ptr, token_ids_ptr, num_prompt_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, S, L, STRIDE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one program counts the tokens of one row's slot ahead of the one that it samples, and changes their
    logits, each token's once: where the first of its positions takes the count. All of it by atomics, so that one
    thread sees what another did."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if (slot >= 0) & (slot < S):
        repetition = tl.load(repetition_ptr + slot)
        presence = tl.load(presence_ptr + slot)
        frequency = tl.load(frequency_ptr + slot)
        length = tl.minimum(tl.load(positions_ptr + row), L)
        num_prompt = tl.load(num_prompt_ptr + slot)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            ids_ptr = token_ids_ptr + slot.to(tl.int64) * L
            row_counts_ptr = counts_ptr + row * V
            nothing = tl.zeros([BLOCK], tl.int32)
            for start in range(0, length, BLOCK):
                _, _, count_ptr, mask = _seen(ids_ptr, row_counts_ptr, start, length, V, BLOCK)
                tl.atomic_xchg(count_ptr, nothing, mask=mask, sem="relaxed")
            tl.debug_barrier()
            for start in range(0, length, BLOCK):
                position, _, count_ptr, mask = _seen(ids_ptr, row_counts_ptr, start, length, V, BLOCK)
                generated = position >= num_prompt
                tl.atomic_add(count_ptr, 1, mask=mask & generated, sem="relaxed")
                tl.atomic_or(count_ptr, _IN_PROMPT, mask=mask & (generated == 0), sem="relaxed")
            tl.debug_barrier()
            for start in range(0, length, BLOCK):
                _, token, count_ptr, mask = _seen(ids_ptr, row_counts_ptr, start, length, V, BLOCK)
                count = tl.atomic_xchg(count_ptr, nothing, mask=mask, sem="relaxed")
                mask &= count != 0
                x_ptr = logits_ptr + row * STRIDE + token
                x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
                x = tl.where(x > 0, x / repetition, x * repetition)
                num_generated = (count & (_IN_PROMPT - 1)).to(tl.float32)
                x -= frequency * num_generated
                x -= tl.where(num_generated > 0, presence, 0.0)
                tl.store(x_ptr, x.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _add_bias_kernel(
    logits_ptr, slots_ptr, ids_ptr, bias_ptr, S, STRIDE: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one program adds the biases of one row."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if (slot >= 0) & (slot < S):
        k = tl.arange(0, BLOCK_K)
        token = tl.load(ids_ptr + slot * K + k, mask=k < K, other=-1)
        mask = (token >= 0) & (token < V)
        bias = tl.load(bias_ptr + slot * K + k, mask=mask, other=0.0)
        x_ptr = logits_ptr + row.to(tl.int64) * STRIDE + token
        x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32) + bias
        tl.store(x_ptr, x.to(logits_ptr.dtype.element_ty), mask=mask)


def widen(logits_RV: Tensor, slots_R: Tensor, mask_SW: Tensor) -> Tensor:
    """A copy in fp32, [R, V] without gaps; -inf for each token whose bit (id % 32 of word id // 32) is not set in its
    slot's words. Rows of slots outside the table are copied whole. Mutates nothing; graph-safe.

    `mask_SW`: int32 [S, >= V / 32].
    """
    R, V = _check_logits(logits_RV, slots_R)
    check_dtype("mask", mask_SW, torch.int32)
    check_contiguous("mask", mask_SW)
    check_shape("mask", mask_SW, None, None)
    S, W = mask_SW.shape
    if W * 32 < V:
        raise ValueError(f"mask: got {W} words a row, wanted at least {-(-V // 32)}")
    if not use_kernels(logits_RV):
        return widen_reference(logits_RV, slots_R, mask_SW)
    wide_RV = torch.empty(R, V, dtype=torch.float32, device=logits_RV.device)
    if R:
        _widen_kernel[(R, cdiv(V, _BLOCK))](
            logits_RV, wide_RV, slots_R, mask_SW, S, STRIDE=logits_RV.stride(0), V=V, W=W, BLOCK=_BLOCK,
            **overlap_options(logits_RV),
        )  # fmt: skip
    return wide_RV


def penalize(
    logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, repetition_S: Tensor, presence_S: Tensor,
    frequency_S: Tensor,
) -> None:  # fmt: skip
    """Repetition penalty on every token that the row's slot has ahead of position `positions_R`, which it samples (over
    1 makes it less likely), presence and frequency penalties on generated ones, in place. Neutral: 1, 0, 0. Rows that
    sample nothing, of position -1, stay as they are. Graph-safe."""
    R, V = _check_logits(logits_RV, slots_R)
    _check_slots(slots_R, R, table.length_S)
    check_shape("positions", positions_R, R)
    check_dtype("positions", positions_R, torch.int32)
    check_device("positions", positions_R, logits_RV)
    for name, tensor in (("repetition", repetition_S), ("presence", presence_S), ("frequency", frequency_S)):
        check_shape(name, tensor, repetition_S.shape[0])
        check_dtype(name, tensor, torch.float32)
        check_device(name, tensor, logits_RV)
    if not use_kernels(logits_RV):
        penalize_reference(logits_RV, slots_R, positions_R, table, repetition_S, presence_S, frequency_S)
    elif R:
        S, L = min(len(repetition_S), len(table.length_S)), table.token_ids_SL.shape[1]
        counts_RV = torch.empty(R, V, dtype=torch.int32, device=logits_RV.device)
        _penalize_kernel[(R,)](
            logits_RV, counts_RV, slots_R, positions_R, table.token_ids_SL, table.num_prompt_S, repetition_S,
            presence_S, frequency_S, S, L, STRIDE=logits_RV.stride(0), V=V, BLOCK=_POSITIONS, num_warps=8,
            **overlap_options(logits_RV),
        )  # fmt: skip


def add_bias(logits_RV: Tensor, slots_R: Tensor, bias_ids_SK: Tensor, bias_SK: Tensor) -> None:
    """Add each slot's biases to its row, in place. Ids are distinct; those outside the vocabulary (-1) are unused."""
    R, V = _check_logits(logits_RV, slots_R)
    check_dtype("bias_ids", bias_ids_SK, torch.int32)
    check_contiguous("bias_ids", bias_ids_SK)
    check_shape("bias_ids", bias_ids_SK, None, None)
    check_shape("bias", bias_SK, *bias_ids_SK.shape)
    check_dtype("bias", bias_SK, torch.float32)
    check_contiguous("bias", bias_SK)
    S, K = bias_ids_SK.shape
    if not use_kernels(logits_RV):
        add_bias_reference(logits_RV, slots_R, bias_ids_SK, bias_SK)
    elif R and K:
        _add_bias_kernel[(R,)](
            logits_RV, slots_R, bias_ids_SK, bias_SK, S,
            STRIDE=logits_RV.stride(0), V=V, K=K, BLOCK_K=next_power_of_2(K), **overlap_options(logits_RV),
        )  # fmt: skip


def widen_reference(logits_RV: Tensor, slots_R: Tensor, mask_SW: Tensor) -> Tensor:
    """The same in PyTorch."""
    wide_RV = logits_RV.float().clone()
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    rows_N = ((slots_R >= 0) & (slots_R < mask_SW.shape[0])).nonzero().squeeze(1)
    allowed_NV = (mask_SW[slots_R[rows_N].long()][:, ids_V // 32] >> (ids_V % 32).int()) & 1
    wide_RV[rows_N] = wide_RV[rows_N].masked_fill(allowed_NV == 0, float("-inf"))
    return wide_RV


def penalize_reference(
    logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, repetition_S: Tensor, presence_S: Tensor,
    frequency_S: Tensor,
) -> None:  # fmt: skip
    """The same in PyTorch."""
    V = logits_RV.shape[1]
    for row, (slot, position) in enumerate(zip(slots_R.tolist(), positions_R.tolist(), strict=True)):
        if not 0 <= slot < min(len(repetition_S), len(table.length_S)):
            continue
        repetition, presence, frequency = (float(some[slot]) for some in (repetition_S, presence_S, frequency_S))
        if (repetition, presence, frequency) == (1.0, 0.0, 0.0):
            continue
        ids_L = table.token_ids_SL[slot, : max(position, 0)].long()
        inside_L = (ids_L >= 0) & (ids_L < V)
        generated_L = torch.arange(len(ids_L), device=ids_L.device) >= table.num_prompt_S[slot]
        generated_V = ids_L[inside_L & generated_L].bincount(minlength=V).float()
        seen_N = ids_L[inside_L].unique()
        x_N = logits_RV[row, seen_N].float()
        x_N = torch.where(x_N > 0, x_N / repetition, x_N * repetition)
        x_N = x_N - frequency * generated_V[seen_N] - presence * (generated_V[seen_N] > 0)
        logits_RV[row, seen_N] = x_N.to(logits_RV.dtype)


def add_bias_reference(logits_RV: Tensor, slots_R: Tensor, bias_ids_SK: Tensor, bias_SK: Tensor) -> None:
    """The same in PyTorch."""
    for row, slot in enumerate(slots_R.tolist()):
        if 0 <= slot < bias_ids_SK.shape[0]:
            ids_K = bias_ids_SK[slot].long()
            used_K = (ids_K >= 0) & (ids_K < logits_RV.shape[1])
            biased = logits_RV[row, ids_K[used_K]].float() + bias_SK[slot][used_K]
            logits_RV[row, ids_K[used_K]] = biased.to(logits_RV.dtype)


def _check_logits(logits_RV: Tensor, slots_R: Tensor) -> tuple[int, int]:
    check_dtype("logits", logits_RV, *FLOATS)
    check_shape("logits", logits_RV, None, None)
    R, V = logits_RV.shape
    if R and logits_RV.stride(1) != 1:
        raise ValueError(f"logits: got strides {list(logits_RV.stride())}, wanted rows without gaps")
    _check_slots(slots_R, R, logits_RV)
    return R, V


def _check_slots(slots_R: Tensor, num_rows: int, like: Tensor) -> None:
    check_shape("slots", slots_R, num_rows)
    check_dtype("slots", slots_R, torch.int32)
    check_contiguous("slots", slots_R)
    check_device("slots", slots_R, like)
