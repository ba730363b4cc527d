"""The ranks of one model and what they say to each other.

One rank needs no torch.distributed at all. Several meet through a file (no port to guess, nothing listening on
every interface): gloo on the CPU, NCCL on GPUs, and beside it peer memory for what is small. It knows tensors, not what
they mean.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tercet.model.exchange import Exchange, connect_exchange
from tercet.model.peers import Peers, connect_peers
from tercet.triton_kernels.all_reduce import all_reduce
from tercet.triton_kernels.all_reduce_words import stack_rows
from tercet.triton_kernels.inbox import Inboxes, WordInboxes
from tercet.triton_kernels.stacked import join_columns, sum_ranks

_ENVIRONMENT = {
    # Both libraries would listen on an outward interface; ranks of one machine need none.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # NVLink multicast can outlive its program and take a host's links down with it; nothing here gains by it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # All connections at once, not each at its first use: that may be in a step that is captured before any was run.
    "NCCL_RUNTIME_CONNECT": "0",
    # Steps in graphs and steps without follow each other on one stream: NCCL need not order them by events of its own.
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
    # Or ranks exchange handles for each buffer of each collective of each graph: that is start-up time.
    "NCCL_GRAPH_REGISTER": "0",
}

# Torch 2.11 knows the second name only; 2.13 warns of it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """Rank `rank` of `size`. With one rank every call returns its argument."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; want 0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.device = device
        self._peers: Peers | None = None
        self._exchange: Exchange | None = None

    @classmethod
    def single(cls, device: torch.device) -> "Group":
        return cls(0, 1, device)

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, rendezvous: str, timeout_s: float = 600.0) -> "Group":
        """Meet the other ranks through the file `rendezvous`, which all can reach and none has used before."""
        group = cls(rank, size, device)
        if size == 1:
            return group
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
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

    def connect(self, row_size: int, dtype: torch.dtype, max_tokens: int = 0, num_sums: int = 0) -> None:
        """Let ranks write rows of this size into each other's memory where they can. Called once, by all, for GPUs.

        `max_tokens`, `num_sums`: rows of the longest step, and how many sums over ranks a step takes of all its rows.
        """
        if self.size == 1 or self.device.type == "cpu":
            return
        self._peers = connect_peers(self.rank, self.size, self.device, row_size, dtype, self.min)
        if self._peers is not None:
            self._exchange = connect_exchange(
                self.rank, self.size, self.device, max_tokens, row_size, num_sums, dtype, self.min
            )

    def inboxes_for(self, x_TD: Tensor) -> Inboxes | None:
        """Where to exchange these rows through peer memory, if that is there and they are few enough for it to pay."""
        return None if self._peers is None else self._peers.inboxes_for(x_TD)

    def exchange_for(self, num_tokens: int) -> Exchange | None:
        """What carries the sums of a step of so many tokens beside its kernels, if that is there and pays."""
        return self._exchange if self._exchange is not None and self._exchange.takes(num_tokens) else None

    def all_reduce(self, x_TD: Tensor, *, deterministic: bool = False) -> Tensor:
        """Sum over ranks, in place. Graph-safe on GPUs. `deterministic`: a row's bits do not depend on T."""
        if self.size == 1:
            return x_TD
        if inboxes := self.inboxes_for(x_TD):
            return all_reduce(x_TD, inboxes)
        if deterministic and self.size > 2:
            # The libraries cut a message into parts and sum each in another order. Of two numbers there is one sum.
            return sum_ranks(self.stack(x_TD), x_TD)
        dist.all_reduce(x_TD)
        return x_TD

    def stack(self, x: Tensor) -> Tensor:
        """Every rank's tensor, of one shape: [...] -> [size, ...]. Graph-safe on GPUs."""
        if self.size == 1:
            return x[None]
        if x.dtype == torch.int32 and isinstance(inboxes := self.inboxes_for(x), WordInboxes):
            return stack_rows(x, inboxes)
        stacked = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _all_gather(stacked, x.contiguous())
        return stacked.view(self.size, *x.shape)

    def all_gather(self, x_RN: Tensor, width: int) -> Tensor:
        """Every rank's columns side by side, the first `width` of them: [R, N] -> [R, width]. Graph-safe on GPUs."""
        return x_RN[:, :width] if self.size == 1 else join_columns(self.stack(x_RN), width)

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
    """Share the machine's cores among the ranks that compute on them; returns this rank's threads.

    No more than OpenMP may have: where it has fewer than oneDNN asks for, products are wrong.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    if (limit := os.environ.get("OMP_THREAD_LIMIT", "")).isdecimal() and int(limit):
        threads = min(threads, int(limit))
    torch.set_num_threads(threads)
    return threads
