"""Numbers on their way from the device to the host, in pinned memory that is used again."""

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.triton_kernels.tiles import next_power_of_2


class HostRooms:
    """Pinned memory for what is on its way to the host, used again and again.

    Torch's would be let go by the thread that has read it, and torch then notes on the stream when that was. A stream
    that is just being captured takes the note for a part of its graph, and to ask for it later is an error.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Tensor]] = {}

    def take(self, num_words: int) -> Tensor:
        """int32, of at least so many words."""
        size = next_power_of_2(max(num_words, 1))
        free = self._free.setdefault(size, deque())
        return free.pop() if free else torch.empty(size, dtype=torch.int32, pin_memory=True)

    def give_back(self, room: Tensor) -> None:
        """By any thread."""
        self._free[len(room)].append(room)


class HostCopy:
    """A tensor of int32 on its way to the host; whole once the step's event is."""

    def __init__(self, words: Tensor, rooms: HostRooms) -> None:
        self._host, self._rooms, self._room = words, rooms, torch.empty(0)
        if words.is_cuda:
            self._room = rooms.take(words.numel())
            self._host = self._room[: words.numel()].view(words.shape)
            self._host.copy_(words, non_blocking=True)

    def read(self) -> NDArray[np.int32]:
        """Once, by any thread."""
        array: NDArray[np.int32] = self._host.numpy().copy()
        if len(self._room):
            self._rooms.give_back(self._room)
        return array
