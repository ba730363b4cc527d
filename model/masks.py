"""Which tokens each slot may sample next, on the device: a bit for each token id, all set where nobody has a grammar.

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
from tercet.triton_kernels.write_masks import write_masks


class Masks:
    """Of all slots of one rank. All of a plan's go to the device in one copy."""

    def __init__(self, num_slots: int, device: torch.device, vocab_size: int, depth: int) -> None:
        """`depth`: plans whose masks may be on their way."""
        self._vocab_size, self._depth = vocab_size, depth
        self._path, self._table = "", np.zeros((0, 0), np.int32)
        self.words_SW = torch.full((num_slots, num_mask_words(vocab_size)), -1, dtype=torch.int32, device=device)
        self.held_S: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Slots whose request has a grammar."""

    def take(self, step: Step) -> None:
        """Take the masks that a plan names, and let go of those of slots that others have entered."""
        for enter in step.enter:
            if self.held_S[enter.slot] and enter.sampling.grammar is None:
                self.words_SW[enter.slot] = -1
            self.held_S[enter.slot] = enter.sampling.grammar is not None
        self.take_named(step)

    def take_named(self, message: Step | Draw) -> None:
        """Take the masks that a message names."""
        if message.masks:
            if message.mask_table != self._path:
                self._path, self._table = message.mask_table, map_mask_table(Path(message.mask_table), self._vocab_size)
            slots, rows = np.frombuffer(message.masks, np.int32).reshape(-1, 2).T
            self._write(slots, self._table, rows)

    def leave_out(self, rows: NDArray[np.integer[Any]], positions_R: Tensor) -> None:
        """See that these rows of a step, whose masks are late, sample nothing."""
        if len(rows):
            run = self._buffer.begin()
            run[: len(rows)] = -1
            run[len(rows) : 2 * len(rows)] = rows
            self._buffer.send(0, 2 * len(rows))
            write_masks(self._buffer.words_W, len(rows), positions_R[:, None])  # as if it were a mask of one word

    def warm_up(self) -> None:
        """Compile what this launches, and have the memory that it needs."""
        nowhere = np.array([-1])
        self._write(nowhere, np.zeros((1, self.words_SW.shape[1]), np.int32), np.array([0]))
        self.leave_out(nowhere, self.words_SW.new_zeros(1))

    @cached_property
    def _buffer(self) -> PlanBuffer:
        """Not there where there is no memory: among compilers."""
        return PlanBuffer(self.words_SW.numel() + len(self.words_SW), self.words_SW.device, self._depth)

    def _write(self, slots: NDArray[np.integer[Any]], table: NDArray[np.int32], rows: NDArray[np.integer[Any]]) -> None:
        run, num_words = self._buffer.begin(), len(slots) * self.words_SW.shape[1]
        np.take(table, rows, 0, run[:num_words].reshape(len(slots), -1), "clip")  # straight to its place
        run[num_words : num_words + len(slots)] = slots
        self._buffer.send(0, num_words + len(slots))
        write_masks(self._buffer.words_W, len(slots), self.words_SW)
