"""Places for the weights of a vision encoder, and how each is filled. Knows no family.

Where a product would not like an MLP's inner size it is filled up with zeros, of which activations make zeros.

Shape suffixes as in `vision_weights.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tercet.model.places import HeadsByAxes, Move
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_weights import Linear, Norm

_MULTIPLE = 64
"""Of filled up inner sizes: whole rows of tiles, and of 16 bytes."""


class VisionPlaces:
    """Allocates tensors and writes down in `moves` how each is filled."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.moves: list[Move] = []
        self.config = config
        self._dtype, self._device = dtype, device

    def patches(self, name: str, shape: Sequence[int], *, bias: bool) -> Linear:
        """A convolution over pixels that do not overlap, of this shape in files."""
        weight_NK = self._empty(self.config.hidden_size, self.config.patch_size)
        self.fill(f"{name}.weight", weight_NK.view(tuple(shape)))
        return Linear(weight_NK, self.vector(f"{name}.bias", len(weight_NK)) if bias else None)

    def norm(self, name: str, size: int, eps: float) -> Norm:
        if self.config.rms_norms:
            return Norm(self.vector(f"{name}.weight", size), None, eps)
        return self.layer_norm(name, size, eps)

    def layer_norm(self, name: str, size: int, eps: float) -> Norm:
        """One with a bias, whatever others do."""
        return Norm(self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size), eps)

    def rms_norm(self, name: str, size: int, eps: float, *, shift: float) -> Norm:
        """One that divides by the root of the mean square, whatever others do, of whose weight files have less: by
        `shift`. In fp32: one and a bit, rounded to 16 bits, would be nearly another number."""
        weight_D = torch.empty(size, dtype=torch.float32, device=self._device)
        self.moves.append(Move(f"{name}.weight", (size,), 0, 0, size, weight_D, shift))
        return Norm(weight_D, None, eps)

    def plain_norm(self, size: int, eps: float) -> Norm:
        """The same without a weight."""
        return Norm(torch.ones(size, dtype=torch.float32, device=self._device), None, eps)

    def head_norms(self, names: Sequence[str]) -> Tensor:
        """Weights for a head's queries and its keys; values have none."""
        weight_3D = torch.ones(3, self.config.head_dim, dtype=torch.float32, device=self._device)
        for name, weight_D in zip(names, weight_3D, strict=False):
            self.turning(name, weight_D)
        return weight_3D

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = True) -> Linear:
        return Linear(self.matrix(f"{name}.weight", rows, columns), self.vector(f"{name}.bias", rows) if bias else None)

    def stacked(self, names: Sequence[str], rows: int, columns: int, *, bias: bool) -> Linear:
        """Several of as many rows each, on top of each other."""
        weight_NK = self._empty(len(names) * rows, columns)
        bias_N = self._empty(len(weight_NK)) if bias else None
        for index, name in enumerate(names):
            own = slice(index * rows, (index + 1) * rows)
            self.fill(f"{name}.weight", weight_NK[own])
            if bias_N is not None:
                self.fill(f"{name}.bias", bias_N[own])
        return Linear(weight_NK, bias_N)

    def bounds(self, names: Sequence[str]) -> Tensor:
        """Of products: what clips what goes in and what comes out."""
        bounds_P22 = torch.empty(len(names), 2, 2, dtype=torch.float32, device=self._device)
        for name, bounds_22 in zip(names, bounds_P22, strict=True):
            for what, ends in zip(("input", "output"), bounds_22, strict=True):
                for end, into in zip(("min", "max"), ends.split(1), strict=True):
                    self.moves.append(Move(f"{name}.{what}_{end}", (), 0, 0, 1, into))
        return bounds_P22

    def empty_linear(self, rows: int, columns: int) -> Linear:
        """One that something else fills."""
        return Linear(self._empty(rows, columns), None)

    def turning(self, name: str, into: Tensor) -> None:
        """Rows of heads that turn by axes."""
        heads = HeadsByAxes(self.config.head_dim)
        self.moves.append(Move(name, tuple(into.shape), 0, 0, len(into), into, heads=heads))

    def turned(self, name: str, rows: int, columns: int) -> Linear:
        """Of which files have rows for columns."""
        weight_NK = self._empty(rows, columns)
        self.fill(name, weight_NK.t())
        return Linear(weight_NK, None)

    def up(self, names: Sequence[str], *, bias: bool, sizes: tuple[int, int] | None = None) -> Linear:
        """What an MLP begins with, of one tensor or of several: rows for gates, then the others. `sizes`: the inner and
        the outer one, if it is of no layer."""
        inner, hidden = sizes or (self.config.inner_size, self.config.hidden_size)
        count, filled = len(names), _filled(inner)
        weight_FD, bias_F = self._zeros(count * filled, hidden), self._zeros(count * filled) if bias else None
        for index, name in enumerate(names):
            rows = slice(index * filled, index * filled + inner)
            self.fill(f"{name}.weight", weight_FD[rows])
            if bias_F is not None:
                self.fill(f"{name}.bias", bias_F[rows])
        return Linear(weight_FD, bias_F)

    def down(self, name: str, *, bias: bool, sizes: tuple[int, int] | None = None) -> Linear:
        """What it ends with."""
        inner, hidden = sizes or (self.config.inner_size, self.config.hidden_size)
        weight_DF = self._zeros(hidden, _filled(inner))
        self.fill(f"{name}.weight", weight_DF[:, :inner])
        return Linear(weight_DF, self.vector(f"{name}.bias", hidden) if bias else None)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.fill(name, self._empty(rows, columns))

    def vector(self, name: str, size: int) -> Tensor:
        return self.fill(name, self._empty(size))

    def vectors(self, names: Sequence[str], size: int) -> Tensor:
        """Several, one behind the other."""
        into_J = self._empty(len(names) * size)
        for name, part in zip(names, into_J.split(size), strict=True):
            self.fill(name, part)
        return into_J

    def scale(self, name: str, size: int) -> Tensor:
        """In fp32: what is multiplied by it is rounded once."""
        return self.fill(name, torch.empty(size, dtype=torch.float32, device=self._device))

    def only(self, name: str, rows: int, columns: int) -> Tensor:
        """A matrix that files have as the only one of a batch."""
        into = self._empty(rows, columns)
        self.fill(name, into[None])
        return into

    def channels_first(self, name: str, rows: int, channels: int) -> Linear:
        """Of all patches of a token, of which files have all patches' first numbers first; we have patches one after
        the other."""
        weight_NE = self._empty(rows, self.config.merge**2 * channels)
        self.moves.append(
            Move(f"{name}.weight", tuple(weight_NE.shape), 0, 0, rows, self._by_patches(weight_NE, channels))
        )
        return Linear(weight_NE, None)

    def convolved(self, name: str, rows: int, channels: int) -> Linear:
        """The same, as a convolution over patches, with a bias."""
        weight_NE = self._empty(rows, self.config.merge**2 * channels)
        self.fill(f"{name}.weight", self._by_patches(weight_NE, channels))
        return Linear(weight_NE, self.vector(f"{name}.bias", rows))

    def channels_last(self, name: str) -> Linear:
        """Of the pixels of a patch, of which files have all colours of one together; we have colours one after the
        other."""
        config, rows = self.config, self.config.hidden_size
        weight_NK = self._empty(rows, config.patch_size)
        pixels = weight_NK.view(rows, 3, config.patch**2).transpose(1, 2)
        self.moves.append(Move(f"{name}.weight", tuple(weight_NK.shape), 0, 0, rows, pixels))
        return Linear(weight_NK, None)

    def by_axes(self, name: str) -> Tensor:
        """Learned positions of columns, then of rows: one table."""
        config = self.config
        table_GD = self._empty(2 * config.axis_positions, config.hidden_size)
        self.fill(name, table_GD.view(2, config.axis_positions, config.hidden_size))
        return table_GD

    def _by_patches(self, weight_NE: Tensor, channels: int) -> Tensor:
        """[rows, channels, merge, merge], where patches lie one after the other."""
        merge = self.config.merge
        return weight_NE.view(len(weight_NE), merge, merge, channels).permute(0, 3, 1, 2)

    def fill(self, name: str, into: Tensor) -> Tensor:
        self.moves.append(Move(name, tuple(into.shape), 0, 0, len(into), into))
        return into

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _filled(inner: int) -> int:
    return -(-inner // _MULTIPLE) * _MULTIPLE
