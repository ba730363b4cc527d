"""Which tokens each slot may sample next: a bit for each token id, all set where nobody has a grammar.

Masks are written into pinned memory, where a step's rows fetch them (`fetch_masks.py`). The device has come to the end
of what fetches a slot's mask before the next one is written: that follows from the token.

Knows slots and words; whose mask says what, and when it is due, is the scheduler's matter.

Shape suffixes: S slots, W words of a mask, R rows of a step.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.ipc.mask_table import map_mask_table, num_mask_words
from tercet.ipc.step_messages import Draw, Step
from tercet.model.slots import PlanBuffer
from tercet.triton_kernels.fetch_masks import fetch_masks
from tercet.triton_kernels.leave_out import leave_out


class Masks:
    """Of all slots of one rank."""

    def __init__(self, num_slots: int, device: torch.device, vocab_size: int, depth: int) -> None:
        """`depth`: plans that may be on their way."""
        self._vocab_size = vocab_size
        self._path, self._table = "", np.zeros((0, 0), np.int32)
        sizes = num_slots, num_mask_words(vocab_size)
        self.words_SW = torch.full(sizes, -1, dtype=torch.int32, device=device)
        self._any_W = torch.full(sizes[1:], -1, dtype=torch.int32, device=device)
        """What allows all: from there it is copied."""
        self.held_S: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Slots whose request has a grammar."""
        if device.type == "cuda":
            self._written_SW = torch.full(sizes, -1, dtype=torch.int32, pin_memory=True)
            self._fetched_S = torch.zeros(num_slots, dtype=torch.int32, pin_memory=True)
        else:  # they are written where they are read
            self._written_SW, self._fetched_S = self.words_SW, self.words_SW.new_zeros(num_slots)
        self._depth = depth

    def take(self, step: Step) -> None:
        """Take the masks that a plan names, and let go of those of slots that others have entered."""
        for enter in step.enter:
            held = enter.sampling.grammar is not None
            if self.held_S[enter.slot] and not held:
                self.words_SW[enter.slot].copy_(self._any_W)
            if self.held_S[enter.slot] != held:
                self.held_S[enter.slot] = self._fetched_S[enter.slot] = held
        self.take_named(step)

    def take_named(self, message: Step | Draw) -> None:
        """Take the masks that a message names."""
        if not message.masks:
            return
        if message.mask_table != self._path:
            self._path, self._table = message.mask_table, map_mask_table(Path(message.mask_table), self._vocab_size)
        written = self._written_SW.numpy()
        for slot, row in np.frombuffer(message.masks, np.int32).reshape(-1, 2).tolist():
            written[slot] = self._table[row]

    def fetch(self, slots_R: Tensor) -> None:
        """Have a step's rows take what was taken for them to the device. Graph-safe."""
        fetch_masks(slots_R, self._fetched_S, self._written_SW, self.words_SW)

    def leave_out(self, rows: NDArray[np.integer[Any]], positions_R: Tensor) -> None:
        """See that these rows of a step, whose masks are late, sample nothing."""
        if len(rows):
            self._late.begin()[: len(rows)] = rows
            self._late.send(0, len(rows))
            leave_out(self._late.words_W[: len(rows)], positions_R)

    @cached_property
    def _late(self) -> PlanBuffer:
        """Not there where there is no memory: among compilers."""
        return PlanBuffer(len(self.words_SW), self.words_SW.device, self._depth)

    def warm_up(self) -> None:
        """Compile what this launches, and have the memory that it needs."""
        self.compile()
        self._late.begin()

    def compile(self) -> None:
        """That alone."""
        nowhere = self.words_SW.new_full((1,), -1)
        self.fetch(nowhere)
        leave_out(nowhere, nowhere)
