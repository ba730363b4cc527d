"""Long messages between ranks, carried by copy engines while kernels compute.

A sum over ranks of thousands of rows takes as long as the link needs, and NCCL's kernels take multiprocessors from
whatever runs beside them. Here every rank copies its part of an update into the others' memory on a stream of its own,
and the kernel that needs the sum adds what has arrived (`add_arrived.py`). With a step's rows in two halves, one
half's parts travel while the other half is computed.

Messages have four places in turn. Whoever sends message n has added up message n - 2, so all others had sent n - 2,
and therefore had added up n - 4, whose place n takes. For the same reason what n was copied from may be overwritten
once n + 2 has been added up: the others sent that only after they had n. All ranks make the same calls, on one stream.

Shape suffixes as in `add_arrived.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.shared_memory import share, share_on_all
from tercet.triton_kernels.add_arrived import Arrivals, add_arrived, add_arrived_rms_norm, begin_step

PLACES = 4
HALVES = 2
_HALF_MULTIPLE = 128
"""Rows of a tile of the products for many rows."""
_FEWEST_TOKENS = 2048
"""Below, halves are too small for products to be as fast as for the whole."""


@dataclass(frozen=True)
class Message:
    """This rank's part of an update, sent."""

    update_TD: Tensor
    number: int


class Exchange:
    """One rank's end. Steps follow each other; `begin` and `end` enclose the messages of one."""

    def __init__(
        self, arrivals: Arrivals, parts_of_ranks: Sequence[Tensor], flags_of_ranks: Sequence[Tensor], owner: object
    ) -> None:
        """`parts_of_ranks`, `flags_of_ranks`: every rank's, in this rank's address space, kept in memory by `owner`."""
        self._arrivals = arrivals
        self._parts_of_ranks = parts_of_ranks
        self._flags_of_ranks = flags_of_ranks
        self._owner = owner
        self._sent = 0
        self._travelling: deque[Message] = deque()
        """Keeps what is still being copied from being overwritten."""
        device = arrivals.parts_QPMD.device
        # Copies are no kernels, but if ever one became one, it must not wait for kernels that wait for it.
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def takes(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is to go this way."""
        return num_tokens >= _FEWEST_TOKENS and half_of(num_tokens) <= self._arrivals.parts_QPMD.shape[2]

    def begin(self, num_tokens_1: Tensor, first: int) -> Tensor:
        """Begin a step; how many of its tokens lie behind the first `first`, int32 [1] on the device.

        One that failed on the way, as a graph without memory does, may have left messages.
        """
        self._sent = 0
        self._travelling.clear()
        return begin_step(self._arrivals, num_tokens_1, first)

    def send(self, update_TD: Tensor) -> Message:
        """Start to copy this rank's part to all others."""
        message = Message(update_TD, self._sent)
        self._sent += 1
        self._travelling.append(message)
        rank, ranks = self._arrivals.rank, len(self._parts_of_ranks)
        with self._beside_the_step():
            for distance in range(1, ranks):  # not all to the same one at once
                peer = (rank + distance) % ranks
                place = rank - (rank > peer)
                parts_PMD = self._parts_of_ranks[peer][message.number % PLACES]
                parts_PMD[place, : len(update_TD)].copy_(update_TD)
                self._flags_of_ranks[peer][message.number, place : place + 1].copy_(self._arrivals.step_1)
        return message

    def add(self, message: Message, residual_TD: Tensor, norm_D: Tensor, eps: float, rows: Tensor | None) -> Tensor:
        """Add a message's sum over ranks into the residual; the total, normed."""
        x_TD = add_arrived_rms_norm(message.update_TD, self._arrivals, message.number, residual_TD, norm_D, eps, rows)
        while self._travelling and self._travelling[0].number <= message.number - 2:
            self._travelling.popleft()
        return x_TD

    def end(self, messages: Sequence[tuple[Message, Tensor]]) -> None:
        """Add the last messages' sums into their residuals; then a step is over."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        for message, residual_TD in messages:
            # Not before the copies have ended: kernels that overlap wait for kernels only.
            add_arrived(message.update_TD, self._arrivals, message.number, residual_TD, overlap=False)
        self._travelling.clear()
        assert self._sent % PLACES == 0, "the next step's first message would take a place that is not free"

    def _beside_the_step(self) -> AbstractContextManager[object]:
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)


def half_of(num_tokens: int) -> int:
    """Rows of the first half of a step."""
    return -(-num_tokens // (2 * _HALF_MULTIPLE)) * _HALF_MULTIPLE


def connect_exchange(
    rank: int,
    size: int,
    device: torch.device,
    max_tokens: int,
    row_size: int,
    num_sums: int,
    dtype: torch.dtype,
    agree: Callable[[int], int],
) -> Exchange | None:
    """For steps of up to `max_tokens` rows with `num_sums` sums each; None where they are short, or memory is short.

    All ranks call it, on GPUs that reach each other; `agree` is the smallest of all ranks' numbers.
    """
    if max_tokens < _FEWEST_TOKENS or HALVES * num_sums % PLACES:
        return None
    shape = (PLACES, size - 1, half_of(max_tokens), row_size)

    def make() -> Exchange:
        parts, parts_owner = share(shape, dtype, size, device)
        flags, flags_owner = share((HALVES * num_sums, size - 1), torch.int32, size, device)
        arrivals = Arrivals(rank, parts[rank], flags[rank], torch.zeros(1, dtype=torch.int32, device=device))
        return Exchange(arrivals, parts, flags, (parts_owner, flags_owner))

    return share_on_all(make, rank, device, agree, "sums of long steps go through NCCL")
