"""Plans on their way to the device: the slot table's tensors, and a `Step` packed into one run of int32 words.

The words of a plan: the rows (slots of decodes and chunks, starts and lengths of chunks), then records of requests that
enter, then entries of page tables, then the ids that the records bring. What is too long for one run goes in several.
Knows layouts; computes nothing.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tercet.ipc.step_messages import Enter, Step
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, RECORD_WORDS, SlotTable

_RECORD = struct.Struct("<9i3fq2i8i")
assert _RECORD.size == 4 * RECORD_WORDS


def make_slot_table(max_num_seqs: int, max_model_len: int, page_size: int, device: torch.device) -> SlotTable:
    """An empty table: all slots done, and one more than requests, for padding rows."""
    num_slots = max_num_seqs + 1
    num_pages = -(-max_model_len // page_size)

    def full(value: float, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

    table = SlotTable(
        page_table_SM=full(0, num_pages),
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
        stop_ids_SE=full(-1, MAX_STOP_IDS),
    )
    table.check()
    return table


@dataclass(frozen=True)
class Changes:
    """What one run of words changes in the table. Word offsets count from the run's start."""

    words: NDArray[np.int32]
    num_records: int
    longest: int
    """Most ids that one record brings."""
    num_pages: int

    @property
    def triples(self) -> int:
        """Where the page table entries start."""
        return self.num_records * RECORD_WORDS


def pack_changes(step: Step, base: int, capacity: int) -> Iterator[Changes]:
    """A plan's changes in runs of at most `capacity` words, each to lie at word `base` of the device's buffer.

    Slots that are left need no change: nothing names them until they are entered again.
    """
    triples = np.frombuffer(step.pages, np.int32)
    if not step.enter and len(triples) <= capacity:
        if len(triples):
            yield Changes(triples, 0, 0, len(triples) // 3)
        return
    for start in range(0, len(triples), capacity // 3 * 3):
        part = triples[start : start + capacity // 3 * 3]
        yield Changes(part, 0, 0, len(part) // 3)
    longest = max(1, capacity // 2 - RECORD_WORDS)
    run: list[tuple[Enter, int, NDArray[np.int32]]] = []
    used = 0
    for enter in step.enter:
        ids = np.frombuffer(enter.token_ids, np.int32)
        for first in range(0, len(ids), longest):
            part = ids[first : first + longest]
            if used + RECORD_WORDS + len(part) > capacity:
                yield _pack_records(run, base)
                run, used = [], 0
            run.append((enter, first, part))
            used += RECORD_WORDS + len(part)
    if run:
        yield _pack_records(run, base)


def _pack_records(run: list[tuple[Enter, int, NDArray[np.int32]]], base: int) -> Changes:
    words = np.empty(sum(RECORD_WORDS + len(ids) for _, _, ids in run), np.int32)
    offset = len(run) * RECORD_WORDS
    for index, (enter, first, ids) in enumerate(run):
        sampling, length = enter.sampling, len(enter.token_ids) // 4
        stop_ids = np.frombuffer(sampling.stop_ids, np.int32).tolist()
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"slot {enter.slot}: got {len(stop_ids)} stop ids, wanted at most {MAX_STOP_IDS}")
        max_length = enter.num_prompt + sampling.max_tokens
        _RECORD.pack_into(
            words.data,
            index * RECORD_WORDS * 4,
            *(enter.slot, first, len(ids), base + offset),
            *(length, max_length, enter.num_prompt + sampling.min_tokens, int(length >= max_length), sampling.top_k),
            *(sampling.temperature, sampling.top_p, sampling.min_p, sampling.seed, enter.num_prompt, 0),
            *(stop_ids + [-1] * (MAX_STOP_IDS - len(stop_ids))),
        )
        words[offset : offset + len(ids)] = ids
        offset += len(ids)
    return Changes(words, len(run), max(len(ids) for _, _, ids in run), 0)


class PlanBuffer:
    """Words on the device, filled through a ring of pinned runs: a copy in flight is never overwritten.

    On the CPU the device's words are written directly.
    """

    def __init__(self, num_words: int, device: torch.device, depth: int) -> None:
        self.words_W = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._on_gpu = device.type == "cuda"
        self._turn = 0
        if self._on_gpu:
            self._host = [torch.zeros(num_words, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
            self._copied = [torch.cuda.Event() for _ in range(depth)]  # type: ignore[no-untyped-call]
        else:
            self._host = [self.words_W]
        self._views: list[NDArray[np.int32]] = [host.numpy() for host in self._host]

    def begin(self) -> NDArray[np.int32]:
        """The run to write next; waits if the device still reads it."""
        if self._on_gpu:
            self._turn = (self._turn + 1) % len(self._host)
            self._copied[self._turn].synchronize()
        return self._views[self._turn]

    def send(self, start: int, stop: int) -> None:
        """Start copying words `start` to `stop` of that run to the device."""
        if self._on_gpu:
            self.words_W[start:stop].copy_(self._host[self._turn][start:stop], non_blocking=True)
            self._copied[self._turn].record()
