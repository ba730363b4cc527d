"""Memory that ranks of one machine write into: how they come by it, and for which messages it is used.

torch's symmetric memory maps a buffer of every rank into all of them; the kernels take it from there. Multicast is not
used. Where GPUs cannot reach each other there are no peers, which is said once, and NCCL carries everything.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.triton_kernels.all_reduce import Inboxes, inbox_shape, words_of

_LOG = logging.getLogger(__name__)
_ROOM_BYTES = 2 * 2**20
"""Most of a message. Inboxes take 4 x ranks times that: two calls in turn, and a number beside each word."""
_BYTES = {2: 2 * 2**20}
_BYTES_OTHERWISE = 128 * 2**10
"""Up to which size a sum goes through peer memory, by number of ranks: where `scripts/bench_all_reduce.py` sees it win.
A rank sends all it has to each of the others, so more ranks gain less."""


@dataclass(frozen=True)
class Peers:
    """Inboxes, and up to how many bytes a message goes through them rather than through NCCL."""

    inboxes: Inboxes
    max_bytes: int

    def inboxes_for(self, x_TD: Tensor) -> Inboxes | None:
        """The inboxes, for rows that fit into them and are few enough."""
        num_words = words_of(x_TD.shape[-1], x_TD.dtype)
        fits = x_TD.ndim == 2 and self.inboxes.hold(x_TD.shape[0], num_words)
        return self.inboxes if fits and x_TD.numel() * x_TD.element_size() <= self.max_bytes else None


def connect_peers(
    rank: int, size: int, device: torch.device, row_size: int, dtype: torch.dtype, agree: Callable[[int], int]
) -> Peers | None:
    """Inboxes for rows of `row_size`, or None. All ranks call it; `agree` is the smallest of all ranks' numbers."""
    row_bytes = row_size * dtype.itemsize
    if row_bytes % 16:
        return None
    words, rows = words_of(row_size, dtype), _ROOM_BYTES // row_bytes
    others = [peer for peer in range(size) if peer != rank]
    reach = all(torch.cuda.can_device_access_peer(device.index, peer) for peer in others)
    if not agree(int(reach)):
        _say_once("GPUs cannot reach each other's memory", rank)
        return None
    owner: list[object] = []
    calls_M = torch.zeros(rows, dtype=torch.int32, device=device)
    try:
        addresses = _share(inbox_shape(size, rows, words), size, device, owner)
    except RuntimeError as error:
        addresses = ()
        reason = str(error).splitlines()[0]
    # Also after the zeros are written, and before any rank writes anything else.
    torch.cuda.synchronize(device)
    if not agree(int(bool(addresses))):
        _say_once(reason if not addresses else "another rank failed", rank)
        return None
    inboxes = Inboxes(rank, addresses, calls_M, words, owner)
    return Peers(inboxes, min(_ROOM_BYTES, _BYTES.get(size, _BYTES_OTHERWISE)))


def _share(shape: tuple[int, ...], size: int, device: torch.device, owner: list[object]) -> tuple[int, ...]:
    """Make this rank's inbox, all zero, and map those of all; `owner` keeps them."""
    import torch.distributed._symmetric_memory as symmetric_memory

    inbox = symmetric_memory.empty(shape, dtype=torch.int64, device=device).zero_()
    assert dist.group.WORLD is not None
    handle = symmetric_memory.rendezvous(inbox, dist.group.WORLD)
    views = [handle.get_buffer(peer, shape, torch.int64) for peer in range(size)]
    owner += [inbox, handle, views]
    return tuple(view.data_ptr() for view in views)


def _say_once(reason: str, rank: int) -> None:
    if rank == 0:
        _LOG.warning("sums over ranks go through NCCL alone: %s", reason)
