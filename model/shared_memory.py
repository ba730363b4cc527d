"""Memory of every rank of one machine that all ranks see, by torch's symmetric memory. Multicast is not used.

Knows how it is made; what lies in it is its users' matter.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def share(shape: Sequence[int], dtype: torch.dtype, size: int, device: torch.device) -> tuple[list[Tensor], object]:
    """A tensor of zeros on each of `size` ranks: every rank's, in this one's address space, and what keeps them.

    All ranks call it, and none writes to another's before all have returned. RuntimeError where it cannot be had.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(tuple(shape), dtype=dtype, device=device).zero_()
    assert dist.group.WORLD is not None
    handle = symmetric_memory.rendezvous(own, dist.group.WORLD)
    return [handle.get_buffer(rank, tuple(shape), dtype) for rank in range(size)], (own, handle)
