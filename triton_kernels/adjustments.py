"""What requests change in their logits, by slot, on the device, and how a plan writes it there.

The same slots as in the slot table, apart from it: few requests ask for any of this, and a step without them touches
none of it. What the numbers do is in `logits.py`.

Shape suffixes: S slots, K biases of a slot, N records, W words.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels

MAX_BIASES = 1024
RECORD_WORDS = 6
"""One record, int32: slot; repetition, presence, frequency penalty (bits of fp32); count of biases, and the offset of
their ids, which their values (bits of fp32) follow."""


@dataclass(frozen=True)
class AdjustmentTable:
    """Rows of slots. Neutral: penalties 1, 0, 0 and no bias (ids -1)."""

    repetition_S: Tensor
    presence_S: Tensor
    frequency_S: Tensor
    bias_ids_SK: Tensor
    bias_SK: Tensor


def make_adjustment_table(num_slots: int, device: torch.device) -> AdjustmentTable:
    """All slots neutral."""
    return AdjustmentTable(
        repetition_S=torch.ones(num_slots, device=device),
        presence_S=torch.zeros(num_slots, device=device),
        frequency_S=torch.zeros(num_slots, device=device),
        bias_ids_SK=torch.full((num_slots, MAX_BIASES), -1, dtype=torch.int32, device=device),
        bias_SK=torch.zeros(num_slots, MAX_BIASES, device=device),
    )


@triton.jit(
    do_not_specialize=["records", "num_words", "S"], do_not_specialize_on_alignment=["records", "num_words", "S"]
)
def _write_adjustments_kernel(
    words_ptr, repetition_ptr, presence_ptr, frequency_ptr, ids_ptr, bias_ptr, records, num_words, S,
    RECORD: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid (N,): one program writes one slot's row."""
    record_ptr = words_ptr + records + tl.program_id(0) * RECORD
    slot = tl.load(record_ptr)
    if (slot >= 0) & (slot < S):
        tl.store(repetition_ptr + slot, tl.load(record_ptr + 1).to(tl.float32, bitcast=True))
        tl.store(presence_ptr + slot, tl.load(record_ptr + 2).to(tl.float32, bitcast=True))
        tl.store(frequency_ptr + slot, tl.load(record_ptr + 3).to(tl.float32, bitcast=True))
        count = tl.load(record_ptr + 4)
        offset = tl.load(record_ptr + 5)
        k = tl.arange(0, K)
        mask = (k < count) & (offset >= 0) & (offset + count + k < num_words)
        tl.store(ids_ptr + slot * K + k, tl.load(words_ptr + offset + k, mask=mask, other=-1))
        bias = tl.load(words_ptr + offset + count + k, mask=mask, other=0)
        tl.store(bias_ptr + slot * K + k, bias.to(tl.float32, bitcast=True))


def write_adjustments(words_W: Tensor, records: int, num_records: int, table: AdjustmentTable) -> None:
    """Apply `num_records` records at word `records` of a plan to the table, in place. Slots outside are dropped."""
    check_shape("words", words_W, None)
    check_dtype("words", words_W, torch.int32)
    check_contiguous("words", words_W)
    check_device("words", words_W, table.bias_SK)
    if not 0 <= records <= records + num_records * RECORD_WORDS <= words_W.shape[0]:
        raise ValueError(f"words: got {num_records} records at {records} of {words_W.shape[0]}, wanted them inside")
    if not use_kernels(words_W):
        write_adjustments_reference(words_W, records, num_records, table)
    elif num_records:
        _write_adjustments_kernel[(num_records,)](
            words_W, table.repetition_S, table.presence_S, table.frequency_S, table.bias_ids_SK, table.bias_SK,
            records, words_W.shape[0], table.repetition_S.shape[0], RECORD=RECORD_WORDS, K=MAX_BIASES, num_warps=4,
        )  # fmt: skip


def write_adjustments_reference(words_W: Tensor, records: int, num_records: int, table: AdjustmentTable) -> None:
    """The same in PyTorch."""
    for record in words_W[records : records + num_records * RECORD_WORDS].view(num_records, RECORD_WORDS):
        slot, count, offset = int(record[0]), int(record[4]), int(record[5])
        if not 0 <= slot < table.repetition_S.shape[0]:
            continue
        penalties = record[1:4].view(torch.float32)
        table.repetition_S[slot], table.presence_S[slot], table.frequency_S[slot] = penalties
        table.bias_ids_SK[slot], table.bias_SK[slot] = -1, 0
        table.bias_ids_SK[slot, :count] = words_W[offset : offset + count]
        table.bias_SK[slot, :count] = words_W[offset + count : offset + 2 * count].view(torch.float32)
