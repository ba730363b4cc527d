"""Random weights of a model's shape, for measuring without a checkpoint (`--load-format dummy`).

Every rank draws the same whole tensors and keeps its slices, so the numbers do not depend on how many ranks there are.
"""

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.weights import expected_shapes

_STANDARD_DEVIATION = 0.02


class DummyCheckpoint:
    """Norm weights are one, everything else normal with a small deviation, drawn on `device`."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.source = "dummy weights"
        self._shapes = expected_shapes(config)
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            yield torch.ones(stop - start, dtype=self._dtype, device=self._device)
            return
        generator = torch.Generator(self._device)
        generator.manual_seed((self._seed + zlib.crc32(name.encode())) % 2**63)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        yield tensor.normal_(0.0, _STANDARD_DEVIATION, generator=generator).narrow(dim, start, stop - start)
