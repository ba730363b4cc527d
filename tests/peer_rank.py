"""One rank of a sum through peer memory: under Triton's interpreter inboxes are files mapped by all ranks.

`python peer_rank.py RANK SIZE FOLDER DTYPE ROWS...` makes one call of each kind for each number of rows, and writes
what came out, call by call, to FOLDER/RANK.safetensors.
"""

import random
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import add_rms_norm
from tercet.triton_kernels.all_reduce import (
    Inboxes,
    all_reduce,
    all_reduce_add_rms_norm,
    inbox_shape,
    stack_rows,
    words_of,
)

MAX_ROWS, HIDDEN = 6, 90
EPS = 1e-5


def drawn(name: str, rank: int, call: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The same numbers in every process that asks for them."""
    seed = sum(map(ord, name)) * 1_000_003 + rank * 1009 + call
    return (torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def mapped_inboxes(rank: int, size: int, folder: Path, dtype: torch.dtype, hidden: int = HIDDEN) -> Inboxes:
    """Files made by whoever comes first: a file of zeros is an inbox that nobody has written to."""
    words = words_of(hidden, dtype) + 3
    shape = inbox_shape(size, MAX_ROWS, words)
    count = torch.Size(shape).numel()
    inboxes = [
        torch.from_file(str(folder / f"inbox{peer}"), shared=True, size=count, dtype=torch.int64)
        for peer in range(size)
    ]
    addresses = tuple(inbox.data_ptr() for inbox in inboxes)
    return Inboxes(rank, addresses, torch.zeros(MAX_ROWS, dtype=torch.int32), words, inboxes)


def main() -> None:
    rank, size, folder, dtype = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), getattr(torch, sys.argv[4])
    inboxes = mapped_inboxes(rank, size, folder, dtype)
    out: dict[str, Tensor] = {}
    weight = drawn("weight", 0, 0, 1, dtype)[0]
    for call, rows in enumerate(map(int, sys.argv[5:])):
        time.sleep(random.random() * 0.02)
        out[f"sum{call}"] = all_reduce(drawn("sum", rank, call, rows, dtype), inboxes)
        residual, update = drawn("residual", 0, call, rows, dtype), drawn("update", rank, call, rows, dtype)
        out[f"normed{call}"] = all_reduce_add_rms_norm(update.clone(), residual, weight, EPS, inboxes)
        out[f"residual{call}"] = residual
        other = drawn("residual", 0, call, rows, dtype)
        out[f"apart{call}"] = add_rms_norm(all_reduce(update, inboxes), other, weight, EPS)
        out[f"added{call}"] = other
        words = torch.arange(rows * 2, dtype=torch.int32).view(rows, 2) - 1000 * rank - call
        out[f"stacked{call}"] = stack_rows(words, inboxes)
    save_file(out, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    main()
