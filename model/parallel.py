"""The ranks of one model and what they say to each other.

One rank needs no torch.distributed at all. Several meet through a file (no port to guess, nothing listening on
every interface): gloo on the CPU, NCCL on GPUs. It knows tensors, not what they mean.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore


class Group:
    """Rank `rank` of `size`. With one rank every call returns its argument."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; want 0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.device = device

    @classmethod
    def single(cls, device: torch.device) -> "Group":
        return cls(0, 1, device)

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, rendezvous: str, timeout_s: float = 600.0) -> "Group":
        """Meet the other ranks through the file `rendezvous`, which all can reach and none has used before."""
        group = cls(rank, size, device)
        if size == 1:
            return group
        # Both libraries would listen on an outward interface; ranks of one machine need none.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=FileStore(rendezvous, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place. Graph-safe with NCCL."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def stack(self, x: Tensor) -> Tensor:
        """Every rank's tensor, of one shape: [...] -> [size, ...]. Graph-safe with NCCL."""
        if self.size == 1:
            return x[None]
        stacked = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(stacked, x.contiguous())
        return stacked.view(self.size, *x.shape)

    def all_gather(self, x_RN: Tensor) -> Tensor:
        """Every rank's columns side by side: [R, N] -> [R, size * N]."""
        if self.size == 1:
            return x_RN
        return self.stack(x_RN).transpose(0, 1).reshape(x_RN.shape[0], self.size * x_RN.shape[1])

    def min(self, value: int) -> int:
        """The smallest of the ranks' values: how many pages every rank can hold."""
        if self.size == 1:
            return value
        smallest = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest.item())

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def set_cpu_threads(size: int) -> int:
    """Share the machine's cores among the ranks that compute on them; returns this rank's threads."""
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    torch.set_num_threads(threads)
    return threads
