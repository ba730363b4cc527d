"""Masks of tokens in memory that processes share: a file in the engine's directory, which each of them maps.

A mask has a bit for each token id, 19 KB of them for 150,000 tokens, and each token of an answer with a grammar has
another one. So they are written where they are read, and messages name rows. A row is written by the process that
computes masks when the scheduler has asked for one, and read by workers when a plan names it; the scheduler asks for
the next one when that plan is complete.
"""

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def create_mask_table(path: Path, num_rows: int, vocab_size: int) -> None:
    """Unless somebody else does, or has. Room for all of it is there at once: what no disk has would kill whoever
    writes. OSError without room."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name) as file:
        os.posix_fallocate(file.fileno(), 0, 4 * num_rows * num_mask_words(vocab_size))
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def map_mask_table(path: Path, vocab_size: int, *, writable: bool = False) -> NDArray[np.int32]:
    """int32 words, a row for each mask. They stay for as long as somebody has them, file or none."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    with path.open("r+b" if writable else "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=access)
    return np.frombuffer(memory, np.int32).reshape(-1, num_mask_words(vocab_size))


def num_mask_words(vocab_size: int) -> int:
    """Of one mask."""
    return -(-vocab_size // 32)
