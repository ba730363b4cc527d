"""What a plan changes on the device, in one launch: requests that enter, entries of page tables, the step's rows.

A run of a plan's words is [rows | header | records | triples | ids]. The header, at a word known as `base`: words of
rows, number of records, number of triples, one unused. `slot_table.py` says what a record is; a triple is (row of
the page tables, index in it, page). The kernel reads the run where the host wrote it, in pinned memory: no copy goes
ahead.

Shape suffixes: W words.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, RECORD_WORDS, SlotTable

_SCALARS = ("length_S", "max_length_S", "min_length_S", "done_S", "top_k_S")
_FIRST_SCALAR, _FIRST_FLOAT, _SEED, _NUM_PROMPT, _ADAPTER, _SHIFT, _FIRST_STOP = 4, 9, 12, 14, 15, 16, 17
_BLOCK = 1024
HEADER_WORDS = 4
_SMALL_GRID = (9, 16)
"""Programs for a plan whose sizes are not known yet: up to 8 records, of 16 tiles each."""


class RunSizes(NamedTuple):
    """What is in a run."""

    num_rows: int
    """Words of rows, from the run's start."""
    base: int
    """The word where the header is."""
    num_records: int
    longest: int
    """Most ids that one record brings."""
    num_triples: int

    @property
    def are_small(self) -> bool:
        """Whether `write_small_plan` writes it all."""
        return self.num_records < _SMALL_GRID[0] and self._tiles <= _SMALL_GRID[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Programs that it takes."""
        return self.num_records + 1, self._tiles

    @property
    def _tiles(self) -> int:
        return -(-max(self.num_rows, self.longest, self.num_triples, 1) // _BLOCK)


_SIZES = ["base", "num_words", "S", "L", "M", "num_page_rows", "num_pages"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _write_plan_kernel(
    run_ptr, rows_ptr, page_table_ptr, token_ids_ptr, length_ptr, num_prompt_ptr, max_length_ptr, min_length_ptr,
    done_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, adapter_ptr, shift_ptr, stop_ids_ptr,
    base, num_words, S, L, M, num_page_rows, num_pages,
    HEADER: tl.constexpr, RECORD: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N + 1 or more, tiles): one program copies BLOCK ids of one record; its first also writes the slot's row.
    The last along N copies BLOCK words of rows and writes BLOCK entries of page tables."""
    num_rows = tl.load(run_ptr + base)
    num_records = tl.load(run_ptr + base + 1)
    num_triples = tl.load(run_ptr + base + 2)
    records_ptr = run_ptr + base + HEADER
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(rows_ptr + index, tl.load(run_ptr + index, mask=index < num_rows), mask=index < num_rows)
        triple_ptr = records_ptr + num_records * RECORD + index * 3
        named = index < num_triples
        rows = tl.load(triple_ptr, mask=named, other=-1)
        entries = tl.load(triple_ptr + 1, mask=named, other=-1)
        pages = tl.load(triple_ptr + 2, mask=named, other=-1)
        inside = (rows >= 0) & (rows < num_page_rows) & (entries >= 0) & (entries < M)
        inside &= (pages >= 0) & (pages < num_pages)
        tl.store(page_table_ptr + rows.to(tl.int64) * M + entries, pages, mask=inside)
    elif tl.program_id(0) < num_records:
        record_ptr = records_ptr + tl.program_id(0) * RECORD
        slot = tl.load(record_ptr)
        if (slot >= 0) & (slot < S):
            first = tl.load(record_ptr + 1)
            count = tl.load(record_ptr + 2)
            offset = tl.load(record_ptr + 3)
            mask = (index < count) & (first + index < L) & (offset + index < num_words)
            ids = tl.load(run_ptr + offset + index, mask=mask)
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
                tl.store(adapter_ptr + slot, tl.load(record_ptr + 15))
                tl.store(shift_ptr + slot, tl.load(record_ptr + 16))
                stop = tl.arange(0, E)
                tl.store(stop_ids_ptr + slot * E + stop, tl.load(record_ptr + 17 + stop))


def write_plan(run_W: Tensor, rows_W: Tensor, sizes: RunSizes, table: SlotTable, num_pages: int) -> None:
    """Apply a run to the table and to the first words of `rows_W`, in place. What points outside is dropped.

    `run_W` is in pinned memory, or where the table is. Offsets of ids count from its start. Two records of one slot may
    differ only in the ids they bring. The run's header says what `sizes` say.
    """
    _check(run_W, rows_W, table)
    num_rows, base, num_records, _, num_triples = sizes
    records = base + HEADER_WORDS
    if not 0 <= num_rows <= base <= records + num_records * RECORD_WORDS + 3 * num_triples <= run_W.shape[0]:
        raise ValueError(f"run: got {run_W.shape[0]} words, wanted {sizes} inside")
    if num_rows > rows_W.shape[0]:
        raise ValueError(f"rows: got {rows_W.shape[0]} words, wanted {num_rows}")
    if use_kernels(rows_W):
        _launch(run_W, rows_W, base, sizes.grid, table, num_pages)
    else:
        write_plan_reference(run_W, rows_W, sizes, table, num_pages)


def write_small_plan(run_W: Tensor, rows_W: Tensor, base: int, table: SlotTable, num_pages: int) -> None:
    """As `write_plan`, whatever plan of `are_small` sizes is in the run by the time it is read: for graphs."""
    _check(run_W, rows_W, table)
    _launch(run_W, rows_W, base, _SMALL_GRID, table, num_pages)


def _check(run_W: Tensor, rows_W: Tensor, table: SlotTable) -> None:
    for name, words_W in (("run", run_W), ("rows", rows_W)):
        check_shape(name, words_W, None)
        check_dtype(name, words_W, torch.int32)
        check_contiguous(name, words_W)
    check_device("rows", rows_W, table.length_S)


def _launch(run_W: Tensor, rows_W: Tensor, base: int, grid: tuple[int, int], table: SlotTable, num_pages: int) -> None:
    S, L = table.token_ids_SL.shape
    num_page_rows, M = table.page_table_SM.shape
    _write_plan_kernel[grid](
        run_W, rows_W, table.page_table_SM, table.token_ids_SL, table.length_S, table.num_prompt_S,
        table.max_length_S, table.min_length_S, table.done_S, table.temperature_S, table.top_k_S, table.top_p_S,
        table.min_p_S, table.seed_S, table.adapter_S, table.shift_S, table.stop_ids_SE,
        base, run_W.shape[0], S, L, M, num_page_rows, num_pages,
        HEADER=HEADER_WORDS, RECORD=RECORD_WORDS, E=MAX_STOP_IDS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def write_plan_reference(run_W: Tensor, rows_W: Tensor, sizes: RunSizes, table: SlotTable, num_pages: int) -> None:
    """The same in PyTorch."""
    num_rows, base, num_records, _, num_triples = sizes
    assert run_W[base : base + 3].tolist() == [num_rows, num_records, num_triples]
    rows_W[:num_rows] = run_W[:num_rows].clone()  # they may be the same memory
    records = base + HEADER_WORDS
    triples = records + num_records * RECORD_WORDS
    for record in run_W[records:triples].view(num_records, RECORD_WORDS):
        _write_record(run_W, record, table)
    num_page_rows, M = table.page_table_SM.shape
    rows_N, entries_N, pages_N = run_W[triples : triples + 3 * num_triples].view(num_triples, 3).long().unbind(1)
    inside_N = (rows_N >= 0) & (rows_N < num_page_rows) & (entries_N >= 0) & (entries_N < M)
    inside_N &= (pages_N >= 0) & (pages_N < num_pages)
    table.page_table_SM[rows_N[inside_N], entries_N[inside_N]] = pages_N[inside_N].int()


def _write_record(run_W: Tensor, record: Tensor, table: SlotTable) -> None:
    S, L = table.token_ids_SL.shape
    slot, first, count, offset = record[:4].tolist()
    if not 0 <= slot < S:
        return
    count = min(count, L - first, run_W.shape[0] - offset)
    table.token_ids_SL[slot, first : first + count] = run_W[offset : offset + count]
    for index, name in enumerate(_SCALARS, _FIRST_SCALAR):
        getattr(table, name)[slot] = record[index]
    floats = record[_FIRST_FLOAT : _FIRST_FLOAT + 3].view(torch.float32)
    table.temperature_S[slot], table.top_p_S[slot], table.min_p_S[slot] = floats
    low, high = record[_SEED : _SEED + 2].tolist()
    table.seed_S[slot] = (high << 32) | (low & 0xFFFFFFFF)
    table.num_prompt_S[slot] = record[_NUM_PROMPT]
    table.adapter_S[slot] = record[_ADAPTER]
    table.shift_S[slot] = record[_SHIFT]
    table.stop_ids_SE[slot] = record[_FIRST_STOP : _FIRST_STOP + MAX_STOP_IDS]
