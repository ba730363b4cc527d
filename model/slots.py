"""Plans on their way to the device: the slot table's tensors, and a `Step` packed into one run of int32 words.

The words of a plan: the rows (slots of decodes and chunks, starts and lengths of chunks), then a header, records of
requests that enter, entries of page tables, the ids that the records bring. What is too long for one run goes in
several. Knows layouts; computes nothing.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tercet.ipc.step_messages import Enter, Step
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, RECORD_WORDS, SlotTable
from tercet.triton_kernels.write_plan import HEADER_WORDS, RunSizes

_RECORD = struct.Struct(f"<9i3fq3i{4 * MAX_STOP_IDS}s")
_HEADER = struct.Struct("<4i")
assert (_RECORD.size, _HEADER.size) == (4 * RECORD_WORDS, 4 * HEADER_WORDS)


def make_slot_table(
    max_num_seqs: int, max_model_len: int, page_size: int, device: torch.device, num_page_tables: int = 1
) -> SlotTable:
    """An empty table: all slots done, and one more than requests, for padding rows."""
    num_slots = max_num_seqs + 1
    num_pages = -(-max_model_len // page_size)
    # Each page table begins as memory does, or kernels would be compiled once more.
    entries = num_pages if num_page_tables == 1 else -(-num_pages // 4) * 4

    def full(value: float, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

    table = SlotTable(
        page_table_SM=torch.zeros(num_page_tables * num_slots, entries, dtype=torch.int32, device=device),
        token_ids_SL=full(0, num_pages * page_size),
        length_S=full(0),
        num_prompt_S=full(0),
        max_length_S=full(0),
        min_length_S=full(0),
        done_S=full(1),
        temperature_S=full(0, dtype=torch.float32),
        top_k_S=full(0),
        top_p_S=full(1, dtype=torch.float32),
        min_p_S=full(0, dtype=torch.float32),
        seed_S=full(0, dtype=torch.int64),
        adapter_S=full(-1),
        shift_S=full(0),
        stop_ids_SE=full(-1, MAX_STOP_IDS),
    )
    table.check()
    return table


class Record(NamedTuple):
    """A request that enters, and some of the ids that it brings."""

    enter: Enter
    first: int
    """Position of the first of these ids."""
    ids: bytes
    shift: int
    """See `SlotTable`."""


@dataclass(frozen=True)
class Changes:
    """What one run of words changes in the table."""

    records: Sequence[Record]
    triples: bytes

    def write(self, words: NDArray[np.int32], base: int, num_rows: int) -> RunSizes:
        """Write it into a run behind its `num_rows` words of rows, its header at word `base`."""
        run = words.data.cast("B")
        _HEADER.pack_into(run, 4 * base, num_rows, len(self.records), len(self.triples) // 12, 0)
        place = 4 * base + _HEADER.size
        ids_place = place + len(self.records) * _RECORD.size + len(self.triples)
        longest = 0
        for record in self.records:
            end = ids_place + len(record.ids)
            _pack_record(run, place, record, ids_place // 4)
            run[ids_place:end] = record.ids
            longest = max(longest, len(record.ids) // 4)
            place, ids_place = place + _RECORD.size, end
        run[place : place + len(self.triples)] = self.triples
        return RunSizes(num_rows, base, len(self.records), longest, len(self.triples) // 12)


NO_CHANGES = Changes((), b"")
"""A run may bring rows alone."""


def split_changes(step: Step, capacity: int, shifts: Mapping[int, int]) -> list[Changes]:
    """A plan's changes in runs of at most `capacity` words. `shifts`: of slots that are entered, where it is not 0.

    Slots that are left need no change: nothing names them until they are entered again.
    """
    if not step.enter and not step.pages:
        return []
    records = [Record(enter, enter.first, enter.token_ids, shifts.get(enter.slot, 0)) for enter in step.enter]
    num_bytes = len(step.pages) + sum(_RECORD.size + len(record.ids) for record in records)
    if num_bytes <= 4 * capacity:  # as nearly always
        return [Changes(records, step.pages)]
    part = 12 * (capacity // 3)
    runs = [Changes((), step.pages[start : start + part]) for start in range(0, len(step.pages), part)]
    part = 4 * max(1, capacity // 2 - RECORD_WORDS)
    run: list[Record] = []
    used = 0
    for whole in records:
        for start in range(0, len(whole.ids), part):
            record = whole._replace(first=whole.first + start // 4, ids=whole.ids[start : start + part])
            size = _RECORD.size + len(record.ids)
            if used + size > 4 * capacity:
                runs.append(Changes(run, b""))
                run, used = [], 0
            run.append(record)
            used += size
    return [*runs, Changes(run, b"")] if run else runs


def _pack_record(run: memoryview, place: int, record: Record, ids_word: int) -> None:
    enter, first, ids, shift = record
    sampling, length = enter.sampling, enter.num_tokens
    num_stops = len(sampling.stop_ids) // 4
    if num_stops > MAX_STOP_IDS:
        raise ValueError(f"slot {enter.slot}: got {num_stops} stop ids, wanted at most {MAX_STOP_IDS}")
    max_length = enter.num_prompt + sampling.max_tokens
    _RECORD.pack_into(
        run, place, enter.slot, first, len(ids) // 4, ids_word,
        length, max_length, enter.num_prompt + sampling.min_tokens, length >= max_length, sampling.top_k,
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.seed, enter.num_prompt, sampling.adapter,
        shift, sampling.stop_ids.ljust(4 * MAX_STOP_IDS, b"\xff"),
    )  # fmt: skip


class PlanBuffer:
    """Words on the device, filled through a ring of pinned runs: what is on its way is never overwritten.

    On the CPU the device's words are written directly, and are the run. A kernel may read a run where it is, instead of
    its copy (`send`); it is to be followed by `sent`.
    """

    def __init__(self, num_words: int, device: torch.device, depth: int) -> None:
        self.words_W = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._on_gpu = device.type == "cuda"
        self._turn = 0
        if self._on_gpu:
            self.runs = [torch.zeros(num_words, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
            self._read = [torch.cuda.Event() for _ in range(depth)]
        else:
            self.runs = [self.words_W]
        self._views: list[NDArray[np.int32]] = [host.numpy() for host in self.runs]

    def begin(self) -> NDArray[np.int32]:
        """The run to write next; waits if the device still reads it."""
        if self._on_gpu:
            self._turn = (self._turn + 1) % len(self.runs)
            self._read[self._turn].synchronize()
        return self._views[self._turn]

    @property
    def turn(self) -> int:
        """Which of `runs` that is."""
        return self._turn

    def send(self, start: int, stop: int) -> None:
        """Start copying words `start` to `stop` of that run to the device."""
        if self._on_gpu:
            self.words_W[start:stop].copy_(self.runs[self._turn][start:stop], non_blocking=True)
            self.sent()

    def put(self, first: int, packed: NDArray[np.int32]) -> None:
        """Write a run of these words alone, from `first` on, and start copying them."""
        stop = first + len(packed)
        self.begin()[first:stop] = packed
        self.send(first, stop)

    def sent(self) -> None:
        """All that reads that run has been launched."""
        if self._on_gpu:
            self._read[self._turn].record()
