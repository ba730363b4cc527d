"""Copies of pages to the host's memory and back, on a stream beside that of the steps.

Neither stream waits for what the other has not begun: a swap says behind which step it is made, a step which swaps it
is behind, and each rank's streams wait for this rank's own. So the scheduler, which hears of rank 0 alone, may plan
what comes next, though others may be a little later. On the CPU copies are done when `make` returns.

Whose pages they are, and why they are copied, is the scheduler's matter.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tercet.ipc.step_messages import Step
from tercet.ipc.swap_messages import Swap
from tercet.model.host_copies import HostRooms
from tercet.model.landings import DoneMidway, EventMidway, Midway
from tercet.triton_kernels.swap_pages import load_pages, store_pages


class _Made(NamedTuple):
    """Copies on their way, and the pinned words that say which."""

    number: int
    done: torch.cuda.Event
    room: Tensor


class Swaps:
    """Of one rank. On a GPU, the thread that runs steps runs these, with the same current stream."""

    def __init__(self, kv_cache: Tensor, host_pages: Tensor, run_ahead: int) -> None:
        """`host_pages`: [place, layer, k/v, kv head, token, dim], pinned. Compiles what makes copies."""
        self._kv_cache, self._host_pages = kv_cache, host_pages
        self._on_gpu = kv_cache.is_cuda
        self._epoch, self._behind = 0, 0
        """`_behind`: the last swap that steps are behind."""
        if self._on_gpu:
            self._stream = torch.cuda.Stream(kv_cache.device)
            self._ran = [torch.cuda.Event() for _ in range(run_ahead + 2)]
            """Of the last steps: as many plans may be in flight when a swap names the one ahead of them."""
            self._made: deque[_Made] = deque()
            self._rooms = HostRooms()
            nowhere = np.zeros(2, np.int32).tobytes()  # page 0, which is padding's, and back
            for stores, loads in ((nowhere, b""), (b"", nowhere)):
                self.make(Swap(0, 0, -1, stores, loads))
            self._stream.synchronize()

    def precede(self, step: Step) -> None:
        """Before a plan begins: it may read and write whatever was copied by the swaps that it is behind."""
        self._meet(step.epoch)
        if not self._on_gpu or step.swapped == self._behind:
            return
        self._behind = step.swapped
        for made in reversed(self._made):
            if made.number <= step.swapped:
                torch.cuda.current_stream().wait_event(made.done)
                break

    def follow(self, step: Step) -> None:
        """Behind all that a plan launches."""
        if self._on_gpu:
            self._ran[step.step_id % len(self._ran)].record()

    def make(self, swap: Swap) -> Midway:
        """Begin these copies; when they are made, what is returned is there."""
        self._meet(swap.epoch)
        if not self._on_gpu:
            self._copy(_pairs(swap), swap)
            return DoneMidway()
        while self._made and self._made[0].done.query():
            self._rooms.give_back(self._made.popleft().room)
        words = _pairs(swap)
        room = self._rooms.take(words.numel())
        room[: words.numel()] = words.flatten()
        with torch.cuda.stream(self._stream):
            if swap.completed >= 0:
                self._stream.wait_event(self._ran[swap.completed % len(self._ran)])
            pairs_P2 = room[: words.numel()].view(-1, 2).to(self._kv_cache.device, non_blocking=True)
            self._copy(pairs_P2, swap)
            done = torch.cuda.Event()
            done.record()
        self._made.append(_Made(swap.number, done, room))
        return EventMidway(done)

    def _copy(self, pairs_P2: Tensor, swap: Swap) -> None:
        copy = store_pages if swap.stores else load_pages
        copy(self._kv_cache, self._host_pages, pairs_P2)

    def _meet(self, epoch: int) -> None:
        """A new scheduler knows nothing of what the last one wanted copied: all of it is over before its first step."""
        if epoch == self._epoch:
            return
        self._epoch, self._behind = epoch, 0
        if self._on_gpu:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._stream.wait_stream(torch.cuda.current_stream())


def _pairs(swap: Swap) -> Tensor:
    """int32, one below the other."""
    return torch.from_numpy(np.frombuffer(swap.stores or swap.loads, np.int32).copy()).view(-1, 2)
