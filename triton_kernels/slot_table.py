"""The slot table: one row per running request, on the device, and what a plan changes in it.

A request's token ids never leave the device between steps: a record of the plan brings them once, then each step
appends one. The last slot is a dummy for padding rows: always done. Knows rows; who enters which is the plan's matter.

Shape suffixes: S slots, M pages of a slot, L positions of a slot, E stop ids of a slot, N records, W words, P pages.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels

MAX_STOP_IDS = 8
RECORD_WORDS = 24
"""One record, int32: slot, first position, count and offset of the ids it brings; length, max_length, min_length,
done, top_k; temperature, top_p, min_p (bits of fp32); seed (low, high); num_prompt, one unused; stop ids (-1: none)."""

_SCALARS = ("length_S", "max_length_S", "min_length_S", "done_S", "top_k_S")
_FIRST_SCALAR, _FIRST_FLOAT, _SEED, _NUM_PROMPT, _FIRST_STOP = 4, 9, 12, 14, 16
_BLOCK = 1024


@dataclass(frozen=True)
class SlotTable:
    """Rows of running requests. All int32 but the three fp32 of sampling and the int64 seed."""

    page_table_SM: Tensor
    token_ids_SL: Tensor
    """Prompt and generated tokens."""
    length_S: Tensor
    """Tokens known."""
    num_prompt_S: Tensor
    max_length_S: Tensor
    """The request is done once it is this long."""
    min_length_S: Tensor
    """Stop ids are not sampled at positions below this."""
    done_S: Tensor
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    seed_S: Tensor
    stop_ids_SE: Tensor

    def check(self) -> None:
        """Refuse a table whose tensors do not fit each other."""
        S = self.length_S.shape[0]
        for field in fields(self):
            name, tensor = field.name, getattr(self, field.name)
            check_contiguous(name, tensor)
            check_device(name, tensor, self.length_S)
            if name in ("temperature_S", "top_p_S", "min_p_S"):
                check_dtype(name, tensor, torch.float32)
            else:
                check_dtype(name, tensor, torch.int64 if name == "seed_S" else torch.int32)
            if tensor.ndim == 1:
                check_shape(name, tensor, S)
        check_shape("page_table_SM", self.page_table_SM, S, None)
        check_shape("token_ids_SL", self.token_ids_SL, S, None)
        check_shape("stop_ids_SE", self.stop_ids_SE, S, MAX_STOP_IDS)


_SIZES = ["records", "num_words", "S", "L"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _write_records_kernel(
    words_ptr, token_ids_ptr, length_ptr, num_prompt_ptr, max_length_ptr, min_length_ptr, done_ptr, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, stop_ids_ptr, records, num_words, S, L,
    RECORD: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, tiles of ids): one program copies BLOCK ids of one record; the first also writes the slot's row."""
    record_ptr = words_ptr + records + tl.program_id(0) * RECORD
    slot = tl.load(record_ptr)
    if (slot >= 0) & (slot < S):
        first = tl.load(record_ptr + 1)
        count = tl.load(record_ptr + 2)
        offset = tl.load(record_ptr + 3)
        index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = (index < count) & (first + index < L) & (offset + index < num_words)
        ids = tl.load(words_ptr + offset + index, mask=mask)
        tl.store(token_ids_ptr + slot.to(tl.int64) * L + first + index, ids, mask=mask)
        if tl.program_id(1) == 0:
            tl.store(length_ptr + slot, tl.load(record_ptr + 4))
            tl.store(max_length_ptr + slot, tl.load(record_ptr + 5))
            tl.store(min_length_ptr + slot, tl.load(record_ptr + 6))
            tl.store(done_ptr + slot, tl.load(record_ptr + 7))
            tl.store(top_k_ptr + slot, tl.load(record_ptr + 8))
            tl.store(temperature_ptr + slot, tl.load(record_ptr + 9).to(tl.float32, bitcast=True))
            tl.store(top_p_ptr + slot, tl.load(record_ptr + 10).to(tl.float32, bitcast=True))
            tl.store(min_p_ptr + slot, tl.load(record_ptr + 11).to(tl.float32, bitcast=True))
            low = tl.load(record_ptr + 12).to(tl.int64) & 0xFFFFFFFF
            tl.store(seed_ptr + slot, (tl.load(record_ptr + 13).to(tl.int64) << 32) | low)
            tl.store(num_prompt_ptr + slot, tl.load(record_ptr + 14))
            stop = tl.arange(0, E)
            tl.store(stop_ids_ptr + slot * E + stop, tl.load(record_ptr + 16 + stop))


@triton.jit(
    do_not_specialize=["triples", "count", "S", "M", "num_pages"],
    do_not_specialize_on_alignment=["triples", "count", "S", "M", "num_pages"],
)
def _write_pages_kernel(words_ptr, page_table_ptr, triples, count, S, M, num_pages, BLOCK: tl.constexpr):
    """Grid (tiles of triples,): one program writes BLOCK entries of page tables; what points outside is dropped."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    triple_ptr = words_ptr + triples + row * 3
    mask = row < count
    slot = tl.load(triple_ptr, mask=mask, other=-1)
    index = tl.load(triple_ptr + 1, mask=mask, other=-1)
    page = tl.load(triple_ptr + 2, mask=mask, other=-1)
    mask &= (slot >= 0) & (slot < S) & (index >= 0) & (index < M) & (page >= 0) & (page < num_pages)
    tl.store(page_table_ptr + slot.to(tl.int64) * M + index, page, mask=mask)


@triton.jit(do_not_specialize=["S", "L"], do_not_specialize_on_alignment=["S", "L"])
def _tokens_at_kernel(slots_ptr, positions_ptr, token_ids_ptr, out_ptr, S, L):
    """Grid (R,): one program looks up one token."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    inside = (slot >= 0) & (slot < S) & (position >= 0) & (position < L)
    tl.store(out_ptr + row, tl.load(token_ids_ptr + slot.to(tl.int64) * L + position, mask=inside, other=-1))


def tokens_at(slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """The token at each row's position of its slot, -1 where that is outside: int32 [R]. Graph-safe."""
    for name, tensor in (("slots", slots_R), ("positions", positions_R)):
        check_shape(name, tensor, slots_R.shape[0])
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.token_ids_SL)
    if not use_kernels(slots_R):
        return tokens_at_reference(slots_R, positions_R, table)
    out_R = torch.empty_like(slots_R)
    if len(slots_R):
        _tokens_at_kernel[(len(slots_R),)](
            slots_R, positions_R, table.token_ids_SL, out_R, *table.token_ids_SL.shape, num_warps=1
        )
    return out_R


def write_records(words_W: Tensor, records: int, num_records: int, longest: int, table: SlotTable) -> None:
    """Apply `num_records` records at word `records` of a plan to the table, in place.

    `longest`: the largest count of ids among them. Two records of one slot may differ only in the ids they bring.
    """
    _check_words(words_W, records, num_records * RECORD_WORDS)
    if not use_kernels(words_W):
        write_records_reference(words_W, records, num_records, table)
    elif num_records:
        S, L = table.token_ids_SL.shape
        _write_records_kernel[(num_records, max(1, triton.cdiv(longest, _BLOCK)))](
            words_W, table.token_ids_SL, table.length_S, table.num_prompt_S, table.max_length_S, table.min_length_S,
            table.done_S, table.temperature_S, table.top_k_S, table.top_p_S, table.min_p_S, table.seed_S,
            table.stop_ids_SE, records, words_W.shape[0], S, L,
            RECORD=RECORD_WORDS, E=MAX_STOP_IDS, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def write_pages(words_W: Tensor, triples: int, count: int, table: SlotTable, num_pages: int) -> None:
    """Apply `count` triples (slot, index in its page table, page) at word `triples` of a plan, in place."""
    _check_words(words_W, triples, 3 * count)
    if not use_kernels(words_W):
        write_pages_reference(words_W, triples, count, table, num_pages)
    elif count:
        S, M = table.page_table_SM.shape
        _write_pages_kernel[(triton.cdiv(count, 256),)](
            words_W, table.page_table_SM, triples, count, S, M, num_pages, BLOCK=256, num_warps=4
        )


def write_records_reference(words_W: Tensor, records: int, num_records: int, table: SlotTable) -> None:
    """The same in PyTorch."""
    S, L = table.token_ids_SL.shape
    for record in words_W[records : records + num_records * RECORD_WORDS].view(num_records, RECORD_WORDS):
        slot, first, count, offset = record[:4].tolist()
        if not 0 <= slot < S:
            continue
        count = min(count, L - first, words_W.shape[0] - offset)
        table.token_ids_SL[slot, first : first + count] = words_W[offset : offset + count]
        for index, name in enumerate(_SCALARS, _FIRST_SCALAR):
            getattr(table, name)[slot] = record[index]
        floats = record[_FIRST_FLOAT : _FIRST_FLOAT + 3].view(torch.float32)
        table.temperature_S[slot], table.top_p_S[slot], table.min_p_S[slot] = floats
        low, high = record[_SEED : _SEED + 2].tolist()
        table.seed_S[slot] = (high << 32) | (low & 0xFFFFFFFF)
        table.num_prompt_S[slot] = record[_NUM_PROMPT]
        table.stop_ids_SE[slot] = record[_FIRST_STOP : _FIRST_STOP + MAX_STOP_IDS]


def tokens_at_reference(slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """The same in PyTorch."""
    S, L = table.token_ids_SL.shape
    inside_R = (slots_R >= 0) & (slots_R < S) & (positions_R >= 0) & (positions_R < L)
    token_ids_R = table.token_ids_SL[slots_R.clamp(0, S - 1).long(), positions_R.clamp(0, L - 1).long()]
    return token_ids_R.masked_fill(~inside_R, -1)


def write_pages_reference(words_W: Tensor, triples: int, count: int, table: SlotTable, num_pages: int) -> None:
    """The same in PyTorch."""
    S, M = table.page_table_SM.shape
    slots_P, indices_P, pages_P = words_W[triples : triples + 3 * count].view(count, 3).long().unbind(1)
    inside_P = (slots_P >= 0) & (slots_P < S) & (indices_P >= 0) & (indices_P < M)
    inside_P &= (pages_P >= 0) & (pages_P < num_pages)
    table.page_table_SM[slots_P[inside_P], indices_P[inside_P]] = pages_P[inside_P].int()


def _check_words(words_W: Tensor, start: int, count: int) -> None:
    check_shape("words", words_W, None)
    check_dtype("words", words_W, torch.int32)
    check_contiguous("words", words_W)
    if not 0 <= start <= start + count <= words_W.shape[0]:
        raise ValueError(f"words: got {words_W.shape[0]}, wanted {count} from word {start} on")
