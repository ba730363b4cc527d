"""Memory of every rank of one machine that all ranks see, by torch's symmetric memory. Multicast is not used.

Knows how it is made, and how ranks agree that it is; what lies in it is its users' matter.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_LOG = logging.getLogger(__name__)
_SOMEWHERE = 2**44
_Shared = TypeVar("_Shared")


def share(shape: Sequence[int], dtype: torch.dtype, size: int, device: torch.device) -> tuple[list[Tensor], object]:
    """A tensor of zeros on each of `size` ranks: every rank's, in this one's address space, and what keeps them.

    All ranks call it, and none writes to another's before all have returned. RuntimeError where it cannot be had. On
    the meta device, for who compiles, there are neither ranks nor memory.
    """
    if device.type == "meta":
        return [torch.empty(tuple(shape), dtype=dtype, device=device) for _ in range(size)], None
    # What torch.distributed._symmetric_memory wraps: its own `empty` imports 500 modules, sympy's among them, to count
    # strides, which takes 2.5 s of a start.
    from torch._C._distributed_c10d import _SymmetricMemory

    own = _SymmetricMemory.empty_strided_p2p((math.prod(shape),), (1,), dtype, device).zero_()
    assert dist.group.WORLD is not None
    handle = _SymmetricMemory.rendezvous(own, dist.group.WORLD.group_name)
    return [handle.get_buffer(rank, tuple(shape), dtype) for rank in range(size)], (own, handle)


def address_of(tensor: Tensor) -> int:
    """Where it begins; for tensors without memory a number of that kind."""
    return _SOMEWHERE if tensor.is_meta else tensor.data_ptr()


def share_on_all(
    make: Callable[[], _Shared], rank: int, device: torch.device, agree: Callable[[int], int], without: str
) -> _Shared | None:
    """What `make` makes of shared memory, once it is there on every rank; or None, if it failed on any.

    All ranks call it; `agree` is the smallest of all ranks' numbers. `without`: what is said in that case.
    """
    made, reason = None, "another rank failed"
    try:
        made = make()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    # Also after the zeros are written, and before any rank writes anything else.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if agree(int(made is not None)):
        return made
    say_once(rank, without, reason)
    return None


def say_once(rank: int, without: str, reason: str) -> None:
    """For all ranks."""
    if rank == 0:
        _LOG.warning("%s: %s", without, reason)
