"""One rank of a sum through peer memory: under Triton's interpreter inboxes are files mapped by all ranks.

`python peer_rank.py RANK SIZE FOLDER DTYPE ROWS...` makes one call of each kind for each number of rows, and writes
what came out, call by call, to FOLDER/RANK.safetensors. `... DTYPE --follow COUNT` makes so many calls with flags of
rows, one upon the other, and checks each.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from triton._C.libtriton.ir import MEM_SEMANTIC
from triton.runtime.interpreter import InterpreterBuilder

from quick_interpreter import quicken
from tercet.model.config import ModelConfig
from tercet.model.exchange import HALVES, PLACES, Exchange
from tercet.triton_kernels.add_arrived import Arrivals
from tercet.triton_kernels.add_rms_norm import add_rms_norm
from tercet.triton_kernels.all_reduce import all_reduce, all_reduce_add_rms_norm, all_reduce_parts, sum_in_order
from tercet.triton_kernels.all_reduce_words import stack_rows
from tercet.triton_kernels.inbox import Inboxes, RowInboxes, WordInboxes

_Inboxes = TypeVar("_Inboxes", WordInboxes, RowInboxes)
MAX_ROWS, HIDDEN = 6, 90
EPS = 1e-5


def drawn(name: str, rank: int, call: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The same numbers in every process that asks for them."""
    seed = sum(map(ord, name)) * 1_000_003 + rank * 1009 + call
    return (torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def mapped(kind: type[_Inboxes], rank: int, size: int, folder: Path, row_bytes: int) -> _Inboxes:
    """Files made by whoever comes first: a file of zeros is an inbox that nobody has written to."""
    row_bytes = -(-row_bytes // 16) * 16 + 16  # longer places than rows
    count = kind.num_bytes(size, MAX_ROWS, row_bytes)
    inboxes = [
        torch.from_file(str(folder / f"{kind.__name__}{peer}"), shared=True, size=count, dtype=torch.uint8)
        for peer in range(size)
    ]
    addresses = tuple(inbox.data_ptr() for inbox in inboxes)
    return kind(rank, addresses, torch.zeros(MAX_ROWS, dtype=torch.int32), row_bytes, inboxes)


def wait_asleep() -> None:
    """There may be more ranks than cores: who looks whether something has come lets others run first."""
    load, add = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw

    def load_later(self: InterpreterBuilder, *args: Any) -> Any:
        if args[-1]:  # volatile
            time.sleep(1e-4)
        return load(self, *args)

    def add_later(self: InterpreterBuilder, *args: Any) -> Any:
        if MEM_SEMANTIC.ACQUIRE in args:
            time.sleep(1e-4)
        return add(self, *args)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw = load_later, add_later


def add_calls(out: dict[str, Tensor], rank: int, call: int, rows: int, dtype: torch.dtype, inboxes: Inboxes) -> None:
    """One call of each kind of sum: what came out."""
    kind = type(inboxes).__name__
    weight = drawn("weight", 0, 0, 1, dtype)[0]
    if call % 2:  # of some families they keep 32 bits
        weight = weight.float()
    residual, update = drawn("residual", 0, call, rows, dtype), drawn("update", rank, call, rows, dtype)
    other = residual.clone()
    out[f"{kind} sum{call}"] = all_reduce(drawn("sum", rank, call, rows, dtype), inboxes)
    out[f"{kind} normed{call}"] = all_reduce_add_rms_norm(update.clone(), residual, weight, EPS, inboxes)
    out[f"{kind} residual{call}"] = residual
    out[f"{kind} apart{call}"] = add_rms_norm(all_reduce(update, inboxes), other, weight, EPS)
    out[f"{kind} added{call}"] = other
    parts = torch.stack([drawn(f"part {i}", rank, call, rows, torch.float32) for i in range(3)])
    residual, other = (drawn("residual", 0, call, rows, dtype) for _ in range(2))
    out[f"{kind} parts{call}"] = all_reduce_parts(parts, dtype, inboxes)
    out[f"{kind} normed parts{call}"] = all_reduce_add_rms_norm(parts, residual, weight, EPS, inboxes)
    out[f"{kind} parts added{call}"] = residual
    out[f"{kind} parts apart{call}"] = add_rms_norm(out[f"{kind} parts{call}"], other, weight, EPS)
    out[f"{kind} parts added apart{call}"] = other


def follow(rank: int, size: int, count: int, dtype: torch.dtype, inboxes: Inboxes) -> None:
    """Calls of other lengths and widths than those before them, alone and fused; now and then this rank comes late."""
    draw, lateness = random.Random(7), random.Random(rank)
    for call in range(count):
        rows, width = draw.choice((1, 1, 1, 1, 1, 1, 2, MAX_ROWS)), draw.choice((HIDDEN, 24, 7))
        values = torch.stack([drawn("follow", peer, call, rows, dtype)[:, :width] for peer in range(size)])
        x = values[rank].clone()
        if lateness.random() < 0.1:
            time.sleep(lateness.random() * 0.03)
        if draw.random() < 0.5:
            total = all_reduce(x, inboxes)
        else:
            total = torch.zeros_like(x)
            all_reduce_add_rms_norm(x, total, x[0], EPS, inboxes)
        assert torch.equal(total, sum_in_order(values)), f"rank {rank}, call {call} of {rows} rows of {width}"


def mapped_exchange(rank: int, size: int, folder: Path, rows: int, config: ModelConfig) -> Exchange:
    """The same for whole messages of fp32."""

    def mapped(name: str, *shape: int, dtype: torch.dtype) -> list[Tensor]:
        count = torch.Size(shape).numel()
        return [
            torch.from_file(str(folder / f"{name}{peer}"), shared=True, size=count, dtype=dtype).view(shape)
            for peer in range(size)
        ]

    parts = mapped("parts", PLACES, size - 1, rows, config.hidden_size, dtype=torch.float32)
    flags = mapped("flags", 2 * HALVES * config.num_layers, size - 1, dtype=torch.int32)
    return Exchange(Arrivals(rank, parts[rank], flags[rank], torch.zeros(1, dtype=torch.int32)), parts, flags, None)


def main() -> None:
    rank, size, folder, dtype = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), getattr(torch, sys.argv[4])
    row_bytes = HIDDEN * dtype.itemsize
    by_word = mapped(WordInboxes, rank, size, folder, row_bytes)
    by_row = mapped(RowInboxes, rank, size, folder, row_bytes)
    out: dict[str, Tensor] = {}
    wait_asleep()
    quicken()
    if sys.argv[5] == "--follow":
        follow(rank, size, int(sys.argv[6]), dtype, by_row)
        return
    for call, rows in enumerate(map(int, sys.argv[5:])):
        if call % 3:  # and now and then without a pause
            time.sleep(random.random() * 0.02)
        add_calls(out, rank, call, rows, dtype, by_word)
        add_calls(out, rank, call, rows, dtype, by_row)
        words = torch.arange(rows * 2, dtype=torch.int32).view(rows, 2) - 1000 * rank - call
        out[f"stacked{call}"] = stack_rows(words, by_word)
    save_file(out, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    main()
