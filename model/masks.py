"""Which tokens each slot may sample next, on the device: a bit for each token id, all set where nobody has a grammar.

Knows slots and words; whose mask says what, and when it is due, is the scheduler's matter.

Shape suffixes: S slots, W words of a mask.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tercet.ipc.mask_table import map_mask_table, num_mask_words
from tercet.ipc.step_messages import Step
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
        if step.masks:
            if step.mask_table != self._path:
                self._path, self._table = step.mask_table, map_mask_table(Path(step.mask_table), self._vocab_size)
            slots, rows = np.frombuffer(step.masks, np.int32).reshape(-1, 2).T
            self._write(slots, self._table, rows)

    def warm_up(self) -> None:
        """Compile what `take` launches, and have the memory that it needs."""
        nothing = np.zeros((1, self.words_SW.shape[1]), np.int32)
        self._write(np.array([-1]), nothing, np.array([0]))

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
