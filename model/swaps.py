"""Copies of pages and states to the host's memory and back, on a stream beside that of the steps.

Neither stream waits for what the other has not begun: a swap says behind which step it is made, a step which swaps it
is behind, and each rank's streams wait for this rank's own. So the scheduler, which hears of rank 0 alone, may plan
what comes next, though others may be a little later. On the CPU copies are done when `make` returns.

Whose they are, and why they are copied, is the scheduler's matter.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from tercet.ipc.step_messages import Step
from tercet.ipc.swap_messages import Swap
from tercet.model.host_memory import PIECE
from tercet.model.host_places import HostPlaces
from tercet.model.kv_cache import KvCache
from tercet.model.landings import DoneMidway, Midway
from tercet.model.page_copies import PageCopies
from tercet.model.states import States

_AT_A_TIME = 2**23
"""Bytes, or a page, or a layer's part of a state, where that is more."""
_ON_THEIR_WAY = 4
"""Times as much: what is small and in a hurry, as a prompt on its way to the device, waits for no more, 0.7 ms."""


class _Made:
    """Copies that are to be made by the thread."""

    def __init__(self, swap: Swap, behind: torch.cuda.Event | None) -> None:
        self.swap, self.behind = swap, behind
        self._done = torch.cuda.Event(blocking=True)
        self._begun = threading.Event()
        self._error: Exception | None = None

    def begun(self, error: Exception | None = None) -> None:
        """By the thread: all of them are on the current stream, or will never be."""
        if error is None:
            self._done.record()
        self._error = error
        self._begun.set()

    @property
    def done(self) -> torch.cuda.Event:
        """Waits until they are begun, which for those that are made by now does not take long."""
        self._begun.wait()
        if self._error is not None:
            raise self._error
        return self._done

    @property
    def is_over(self) -> bool:
        return self._begun.is_set() and self.done.query()

    def wait(self) -> None:
        self.done.synchronize()


class Swaps:
    """Of one rank. On a GPU, the thread that runs steps runs these, with the same current stream.

    Copies are begun by a thread, few at a time: engines take all copies in turn, and one that steps need, of whatever
    stream, would wait for all that is begun.
    """

    def __init__(self, kv_cache: KvCache, places: HostPlaces, run_ahead: int, states: States | None = None) -> None:
        """`states`: where there are places for them."""
        blocks = zip(kv_cache.blocks, places.pages, strict=True)
        self._of_pages = [PageCopies(block, host_pages, PIECE) for block, host_pages in blocks]
        self._of_states = [] if states is None else _of_states(states, places)
        self._on_gpu = kv_cache.device.type == "cuda"
        self._epoch, self._behind = 0, 0
        """`_behind`: the last swap that steps are behind."""
        if self._on_gpu:
            self._stream = torch.cuda.Stream(kv_cache.device)
            self._ran = [torch.cuda.Event() for _ in range(run_ahead + 2)]
            """Of the last steps: as many plans may be in flight when a swap names the one ahead of them."""
            self._made: deque[_Made] = deque()
            self._orders: queue.SimpleQueue[_Made] = queue.SimpleQueue()
            threading.Thread(target=self._run, name="swaps", daemon=True).start()
            nowhere = np.zeros(2, np.int32).tobytes()  # page 0, which is padding's, and back: a first copy takes longer
            for stores, loads in ((nowhere, b""), (b"", nowhere)):
                self.make(Swap(0, 0, -1, stores, loads)).wait()

    def precede(self, step: Step) -> None:
        """Before a plan begins: it may read and write whatever was copied by the swaps that it is behind."""
        self._meet(step.epoch)
        if not self._on_gpu or step.swapped == self._behind:
            return
        self._behind = step.swapped
        for made in reversed(self._made):
            if made.swap.number <= step.swapped:
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
            for _ in self._copy(swap):
                pass
            return DoneMidway()
        while self._made and self._made[0].is_over:
            self._made.popleft()
        behind = self._ran[swap.completed % len(self._ran)] if swap.completed >= 0 else None
        made = _Made(swap, behind)
        self._made.append(made)
        self._orders.put(made)
        return made

    def _run(self) -> None:
        """The thread."""
        arrivals = [torch.cuda.Event(blocking=True) for _ in range(_ON_THEIR_WAY)]
        with torch.cuda.stream(self._stream):
            while True:
                made = self._orders.get()
                try:
                    if made.behind is not None:
                        self._stream.wait_event(made.behind)
                    for copied in self._copy(made.swap):
                        arrivals[copied % _ON_THEIR_WAY].record()
                        arrivals[(copied + 1) % _ON_THEIR_WAY].synchronize()
                    made.begun()
                except Exception as error:  # noqa: BLE001  raised by who waits for it
                    made.begun(error)

    def _copy(self, swap: Swap) -> Iterator[int]:
        """A number after each few pages, or layers of a state."""
        number = 0
        for of, stores, loads in (
            (self._of_pages, swap.stores, swap.loads),
            (self._of_states, swap.stored_states, swap.loaded_states),
        ):
            pairs: list[list[int]] = np.frombuffer(stores or loads, np.int32).reshape(-1, 2).tolist()
            for copies in of:
                copy, at_a_time = copies.store if stores else copies.load, max(_AT_A_TIME // copies.num_bytes, 1)
                for first in range(0, len(pairs), at_a_time):
                    copy(pairs[first : first + at_a_time])
                    yield number
                    number += 1

    def _meet(self, epoch: int) -> None:
        """A new scheduler knows nothing of what the last one wanted copied: all of it is over before its first step."""
        if epoch == self._epoch:
            return
        self._epoch, self._behind = epoch, 0
        if self._on_gpu:
            for made in self._made:
                torch.cuda.current_stream().wait_event(made.done)
            torch.cuda.current_stream().wait_stream(self._stream)
            self._stream.wait_stream(torch.cuda.current_stream())


def _of_states(states: States, places: HostPlaces) -> list[PageCopies]:
    """Together they copy whole ones, each a few layers."""
    copies = []
    for pool, host in ((states.tails_LSTC, places.tails), (states.states_LSHDV, places.states)):
        assert host is not None
        few = max(_AT_A_TIME // host[0, 0].nbytes, 1)
        for first in range(0, len(pool), few):
            lines = pool[first : first + few, None], host[:, first : first + few, None]
            copies.append(PageCopies(*lines, PIECE))
    return copies
