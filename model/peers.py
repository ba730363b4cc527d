"""Memory that ranks of one machine write into: how they come by it, and for which messages it is used.

The kernels take it from there. Where GPUs cannot reach each other there are no peers, which is said once, and NCCL
carries everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tercet.model.shared_memory import address_of, say_once, share, share_on_all
from tercet.triton_kernels.inbox import Inboxes, RowInboxes, WordInboxes

_Inboxes = TypeVar("_Inboxes", WordInboxes, RowInboxes)
_WITHOUT = "sums over ranks go through NCCL alone"
_WORDS_ROOM = 2 * 2**20
"""For rows with numbers beside their words, whatever their limit: short rows, of ids and scores, come in any number."""


@dataclass(frozen=True)
class Limits:
    """Bytes of a sum up to which it goes through peer memory: with numbers in its words, with flags of its rows."""

    words: int
    rows: int


_LIMITS = {2: Limits(256 * 2**10, 16 * 2**20), 4: Limits(160 * 2**10, 16 * 2**20)}
_LIMITS_OTHERWISE = Limits(128 * 2**10, 2**20)
"""By number of ranks: for two and four as scripts/bench_all_reduce.py says of H200s; otherwise they are estimates."""


@dataclass(frozen=True)
class Peers:
    """Inboxes of both kinds, and which sum goes through which rather than through NCCL."""

    words: WordInboxes
    rows: RowInboxes
    limits: Limits

    def inboxes_for(self, x_TD: Tensor) -> Inboxes | None:
        """The inboxes, for rows that fit into them and are few enough."""
        if x_TD.ndim != 2:
            return None
        num_rows, row_bytes = x_TD.shape[0], x_TD.shape[1] * x_TD.element_size()
        if num_rows * row_bytes <= self.limits.words and self.words.hold(num_rows, row_bytes):
            return self.words
        return self.rows if num_rows * row_bytes <= self.limits.rows and self.rows.hold(num_rows, row_bytes) else None


def connect_peers(
    rank: int,
    size: int,
    device: torch.device,
    row_size: int,
    dtype: torch.dtype,
    agree: Callable[[int], int],
    limits: Limits | None = None,
) -> Peers | None:
    """Inboxes for rows of `row_size`, or None. All ranks call it; `agree` is the smallest of all ranks' numbers."""
    limits = limits or _LIMITS.get(size, _LIMITS_OTHERWISE)
    row_bytes = row_size * dtype.itemsize
    if row_bytes % 16:
        return None
    others = [peer for peer in range(size) if peer != rank]
    reach = device.type == "meta" or all(
        torch.cuda.can_device_access_peer(device.index, device.index - rank + peer) for peer in others
    )
    if not agree(int(reach)):
        say_once(rank, _WITHOUT, "GPUs cannot reach each other's memory")
        return None

    def make() -> Peers:
        words = _share(WordInboxes, rank, size, device, row_bytes, _WORDS_ROOM)
        return Peers(words, _share(RowInboxes, rank, size, device, row_bytes, limits.rows), limits)

    return share_on_all(make, rank, device, agree, _WITHOUT)


def _share(
    kind: type[_Inboxes], rank: int, size: int, device: torch.device, row_bytes: int, room_bytes: int
) -> _Inboxes:
    """Make this rank's inbox, all zero, and map those of all."""
    num_rows = max(room_bytes // row_bytes, 1)
    inboxes, owner = share([kind.num_bytes(size, num_rows, row_bytes)], torch.uint8, size, device)
    calls_M = torch.zeros(num_rows, dtype=torch.int32, device=device)
    return kind(rank, tuple(map(address_of, inboxes)), calls_M, row_bytes, owner)
