"""Random weights of a model's shape, for measuring without a checkpoint (`--load-format dummy`).

Every rank draws the same whole tensors and keeps its slices, so the numbers do not depend on how many ranks there are,
nor on whether what config.json says is in FP8 stays so.

Shape suffixes: N rows, K columns, B blocks of rows, G groups of columns.
"""

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.quantization import Quantization
from tercet.model.shard import ScaleGroups
from tercet.model.weights import expected_shapes
from tercet.triton_kernels.checks import FP8, FP8_MOST
from tercet.triton_kernels.scaled_weight import ScaledWeight, expand_reference

_STANDARD_DEVIATION = 0.02
_FP8_DEVIATION = 64.0
"""Of numbers in FP8: nearly none is beyond the largest, or so small that it has fewer digits."""


class DummyCheckpoint:
    """Norm weights are one, everything else normal with a small deviation, drawn on `device`."""

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        self.source = "dummy weights"
        self._shapes = expected_shapes(config)
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._blocks: dict[str, tuple[int, int]] = {}
        """Rows and columns that share a scale, of matrices in FP8."""
        if quantization is not None and quantization.is_fp8:
            self._blocks = {
                name: block
                for name, shape in self._shapes.items()
                if name.endswith("_proj.weight") and shape[1] % (block := _block(quantization, shape))[1] == 0
            }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        if name.endswith("norm.weight"):
            yield torch.ones(stop - start, dtype=self._dtype, device=self._device)
            return
        whole = expand_reference(self._scaled(name)) if name in self._blocks else self._normal(name)
        yield whole.narrow(dim, start, stop - start)

    def scale_groups(self) -> ScaleGroups:
        return {name: columns for name, (_, columns) in self._blocks.items()}

    def read_scaled(self, name: str, dim: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        whole, columns = self._scaled(name), self._blocks[name][1]
        numbers_NK, scales_NG = whole.numbers_NK, whole.scales_GN.t()
        if dim == 0:
            yield numbers_NK[start:stop], scales_NG[start:stop]
        else:
            yield numbers_NK[:, start:stop], scales_NG[:, start // columns : -(-stop // columns)]

    def _normal(self, name: str, deviation: float = _STANDARD_DEVIATION) -> Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        return whole.normal_(0.0, deviation, generator=self._generator(name))

    def _scaled(self, name: str) -> ScaledWeight:
        rows, columns = self._blocks[name]
        N, K = self._shapes[name]
        numbers_NK = self._normal(name, _FP8_DEVIATION).clamp_(-FP8_MOST, FP8_MOST).to(FP8)
        scales_GB = torch.empty(K // columns, -(-N // rows), device=self._device)
        each = _STANDARD_DEVIATION / _FP8_DEVIATION
        scales_GB.uniform_(0.5 * each, 1.5 * each, generator=self._generator(f"{name}'s scales"))
        return ScaledWeight(numbers_NK, scales_GB.repeat_interleave(rows, 1)[:, :N], self._dtype)

    def _generator(self, what: str) -> torch.Generator:
        generator = torch.Generator(self._device)
        generator.manual_seed((self._seed + zlib.crc32(what.encode())) % 2**63)
        return generator


def _block(quantization: Quantization, shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = quantization.block or (1, shape[1])
    return rows, min(columns, shape[1])
