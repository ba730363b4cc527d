"""Places of one rank's tensors, and how each is filled: from which slice of which tensor of a checkpoint.

Knows types, ranks and what may be kept as it is stored; which tensors there are is known by `shard.py`.

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.empty_matrix import empty_matrix
from tercet.model.scaled_rows import Kept
from tercet.triton_kernels.scaled_weight import Weight

Rows = tuple[str, int, int, int]
"""Name of a tensor, how many rows it has, the first that is meant, and how many."""


@dataclass(frozen=True)
class HeadsInPairs:
    """Rows of heads of which the first numbers turn, each with its neighbour: their places here, where each turns with
    the one half of them further."""

    size: int
    turned: int

    def places(self, first: int, count: int) -> Tensor:
        """Of so many rows, from this one on; the first of all begins a head."""
        row = torch.arange(first, first + count)
        within = row % self.size
        halves = within % 2 * (self.turned // 2) + within // 2
        return row - within + torch.where(within < self.turned, halves, within)


@dataclass(frozen=True)
class HeadsByAxes:
    """Rows of heads of which a patch's column turns the first half, each number with that a quarter of a head further,
    and its row the second: their places here, where each turns with the one half a head further, rows' ahead."""

    size: int

    def places(self, first: int, count: int) -> Tensor:
        """As above."""
        row, quarter = torch.arange(first, first + count), self.size // 4
        within = row % self.size
        return row - within + torch.tensor([1, 3, 0, 2])[within // quarter] * quarter + within % quarter


@dataclass(frozen=True)
class Move:
    """Copy slice `start:stop` of dimension `dim` of tensor `name` (whole shape `shape`) into `into`.

    `into` may have other dimensions behind the first, of as many numbers. `shift` is added to the numbers first, and
    then they are multiplied by `factor`. `rest`: what the type of `into` leaves of the numbers when they are rounded to
    it. `heads`: of what the rows are, if they do not follow each other in `into` as they do in the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    into: Weight
    shift: float = 0.0
    factor: float = 1.0
    rest: bool = False
    heads: HeadsInPairs | HeadsByAxes | None = None

    def rows(self, first: int, count: int) -> slice | Tensor:
        """Which rows of `into` so many are that are read from this one on."""
        return slice(first, first + count) if self.heads is None else self.heads.places(first, count)

    def changed(self, piece: Tensor) -> Tensor:
        """What goes into `into` for a piece of what was read: in fp32, to be rounded once."""
        if self.rest:
            return piece.float() - piece.to(self.into.dtype).float()
        if self.shift == 0 and self.factor == 1:
            return piece
        return (piece.float() + self.shift) * self.factor


class Places:
    """Allocates tensors and writes down in `moves` how each is filled."""

    def __init__(
        self, config: ModelConfig, rank: int, size: int, dtype: torch.dtype, device: torch.device, kept: Kept
    ) -> None:
        """`kept`: what is, as it is stored, if the matrix that it goes into can be so."""
        self.rank, self.size = rank, size
        self.dtype, self.device = dtype, device
        self.moves: list[Move] = []
        self._config, self._kept = config, kept

    def matrix(self, names: Iterable[str], rows: int, columns: int, whole: int) -> Weight:
        """A place for `columns` columns, of `whole` that these tensors have: kept as stored if all of them are so in
        one way, and neither a group nor what products read at once is cut."""
        ways = {self._kept.get(name) for name in names}
        way = ways.pop() if len(ways) == 1 else None
        return empty_matrix(way, rows, columns, whole, self.dtype, self.device)

    def stacked(self, rows: Sequence[Rows], columns: int) -> Weight:
        """Some rows of some tensors that have so many columns, on top of each other: filled in this order."""
        into = self.matrix({name for name, *_ in rows}, sum(count for *_, count in rows), columns, columns)
        place = 0
        for name, whole, start, count in rows:
            self.rows(name, whole, start, into[place : place + count])
            place += count
        return into

    def is_kept(self, name: str) -> bool:
        """Whether a tensor may be, as it is stored."""
        return name in self._kept

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def norm(self, name: str, length: int, factor: float = 1.0) -> Tensor:
        """The weight of a norm: with what is added to it, so that kernels need not know of that.

        Some are in fp32 then: one and a bit, rounded to 16 bits, would be nearly another number.
        """
        dtype = torch.float32 if self._config.float32_norms else self.dtype
        into = torch.empty(length, dtype=dtype, device=self.device)
        self.moves.append(Move(f"{name}.weight", (length,), 0, 0, length, into, self._config.norm_shift, factor))
        return into

    def numbers(
        self, name: str, whole: int, start: int = 0, count: int | None = None, *, factor: float = 1.0
    ) -> Tensor:
        """Some of a tensor of `whole` numbers, or all, in fp32, times `factor`."""
        count = whole if count is None else count
        into = torch.empty(count, dtype=torch.float32, device=self.device)
        self.moves.append(Move(name, (whole,), 0, start, start + count, into, factor=factor))
        return into

    def whole(self, name: str, length: int) -> Tensor:
        into = self.empty(length)
        self.rows(name, length, 0, into)
        return into

    def scalar(self, name: str, into: Tensor) -> None:
        """Fill `into`, of one number, with a tensor that has no dimension."""
        self.moves.append(Move(name, (), 0, 0, 1, into))

    def rows(
        self, name: str, whole: int, start: int, into: Weight, heads: HeadsInPairs | None = None
    ) -> None:  # fmt: skip
        """Fill `into` with rows `start` and on of a tensor that has `whole` rows."""
        self.moves.append(Move(name, (whole, *into.shape[1:]), 0, start, start + into.shape[0], into, heads=heads))

    def columns(self, name: str, rows: int, whole: int) -> Weight:
        """This rank's share of the columns."""
        into = self.matrix([name], rows, whole // self.size, whole)
        self.share(name, whole, into)
        return into

    def share(self, name: str, whole: int, into: Weight) -> None:
        """Fill `into` with this rank's columns of a tensor that has `whole` columns."""
        self.some_columns(name, whole, self.rank * into.shape[1], into)

    def some_columns(self, name: str, whole: int, start: int, into: Weight) -> None:
        """Fill `into` with columns `start` and on of a tensor that has `whole` columns."""
        rows, count = into.shape
        self.moves.append(Move(name, (rows, whole), 1, start, start + count, into))
