"""Inboxes: memory of each rank that the others write rows into, and what of it a call takes.

An inbox has a place for each row of each rank, twice: calls of a row take turns. Two kinds: in one every word of a row
has its call's number beside it (`all_reduce_words.py`), in the other a row has one number, its flag
(`all_reduce_rows.py`, `all_reduce_slices.py`). It knows addresses and sizes, not how the memory came about, and no
kernel.

Shape suffixes: M rows that an inbox has places for.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class _Places:
    """Where ranks write to each other. An inbox is all zero before the first call of any rank."""

    rank: int
    addresses: tuple[int, ...]
    """Where each rank's inbox begins, in this rank's address space: at multiples of 16 bytes."""
    calls_M: Tensor
    """int32, zero at first: how many calls each row has been in."""
    row_bytes: int
    """The longest row."""
    owner: object
    """Keeps this rank's inbox, and its view of the others', in memory."""

    def hold(self, num_rows: int, row_bytes: int) -> bool:
        """Whether there is a place for so many rows of so many bytes."""
        return 0 < num_rows <= self.calls_M.shape[0] and row_bytes <= self.row_bytes

    def check_room(self, num_rows: int, row_bytes: int) -> None:
        if not self.hold(num_rows, row_bytes):
            raise ValueError(
                f"x: got {num_rows} rows of {row_bytes} bytes, wanted 1 to {self.calls_M.shape[0]} rows "
                f"of at most {self.row_bytes}"
            )


@dataclass(frozen=True)
class WordInboxes(_Places):
    """int64 [2, ranks, M, words of 4 bytes]: a call's number above each word."""

    @staticmethod
    def num_bytes(num_ranks: int, num_rows: int, row_bytes: int) -> int:
        """Of one inbox."""
        return 2 * num_ranks * num_rows * row_bytes * 2


@dataclass(frozen=True)
class RowInboxes(_Places):
    """Rows as they are, [2, ranks, M, row], and behind them int32 flags, [2, ranks, M]."""

    def __post_init__(self) -> None:
        if self.row_bytes % 16:
            raise ValueError(f"inboxes: got places of {self.row_bytes} bytes, wanted a multiple of 16")

    @staticmethod
    def num_bytes(num_ranks: int, num_rows: int, row_bytes: int) -> int:
        """Of one inbox."""
        return 2 * num_ranks * num_rows * (row_bytes + 4)


Inboxes = WordInboxes | RowInboxes
