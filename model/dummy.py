"""Random weights of a model's shape, for measuring without a checkpoint (`--load-format dummy`).

Every rank draws the same whole tensors and keeps its slices, so the numbers do not depend on how many ranks there are,
nor on whether what is kept as config.json says that it is stored.

Shape suffixes: N rows, K columns, B blocks of rows, G groups of columns.
"""

import zlib
from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.quantization import Quantization
from tercet.model.scaled_rows import Kept, ScaledRows, StoredAs
from tercet.model.weights import expected_shapes
from tercet.triton_kernels.checks import FP8, FP8_MOST
from tercet.triton_kernels.scaled_weight import E8M0, MX_GROUP

_ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", ".layer_scalar", ".router.scale", ".per_expert_scale")
_STANDARD_DEVIATION = 0.02
_QUANTIZED = "_proj.weight", "_proj_with_mqa.weight", "_proj_qkv.weight", "_proj_z.weight", "_proj_qkvz.weight"
"""How the names of matrices end that are not plain where config.json says so."""
_FP8_DEVIATION = 64.0
"""Of numbers in FP8: nearly none is beyond the largest, or so small that it has fewer digits."""
_FOUR_BITS_DEVIATION = 3.0
"""Of numbers from 0 to 15 around 8: few would be beyond."""
_MX_POWERS = 119, 122
"""Of MXFP4, whose numbers are three or so, as E8M0 has them: from the first up to the second."""


class DummyCheckpoint:
    """Norm weights are one, everything else normal with a small deviation, drawn on `device`."""

    def __init__(
        self,
        what: ModelConfig | Mapping[str, tuple[int, ...]],
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        """`what`: a model, or the shapes of some tensors by their names."""
        self.source = "dummy weights"
        self._shapes = expected_shapes(what) if isinstance(what, ModelConfig) else what
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._scaled: dict[str, tuple[StoredAs, int]] = {}
        """And how many rows share a scale."""
        if quantization is not None:
            for name, shape in self._shapes.items():
                if name.endswith(_QUANTIZED) and (how := _stored_as(quantization, name, shape[1], dtype)) is not None:
                    self._scaled[name] = how

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        if name.endswith(_ONES):
            yield torch.ones(stop - start, dtype=self._dtype, device=self._device)
            return
        whole = self._scaled_rows(name).expanded() if name in self._scaled else self._normal(name)
        yield whole.view(-1, *whole.shape[1:]).narrow(dim, start, stop - start)  # a number alone is a row, too

    def quantized(self) -> Set[str]:
        return self._scaled.keys()

    def stored_as(self) -> Kept:
        return {name: way for name, (way, _) in self._scaled.items()}

    def read_scaled(self, name: str, dim: int, start: int, stop: int) -> Iterator[ScaledRows]:
        whole = self._scaled_rows(name)
        yield whole.rows(start, stop) if dim == 0 else whole.columns(start, stop)

    def _normal(self, name: str, deviation: float = _STANDARD_DEVIATION) -> Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        return whole.normal_(0.0, deviation, generator=self._generator(name))

    def _scaled_rows(self, name: str) -> ScaledRows:
        """All."""
        (bits, group, of_scales), rows = self._scaled[name]
        N, K = self._shapes[name]
        if of_scales is E8M0:
            return self._mx_rows(name, N, K // group)
        zeros_NG, deviation = None, _FP8_DEVIATION if bits == 8 else _FOUR_BITS_DEVIATION
        numbers_NK = self._normal(name, deviation)
        if bits == 8:
            numbers_NK = numbers_NK.clamp_(-FP8_MOST, FP8_MOST).to(FP8)
        else:
            numbers_NK = numbers_NK.round_().add_(8).clamp_(0, 15).to(torch.uint8)
            zeros_NG = torch.empty(N, K // group, device=self._device)
            zeros_NG.random_(7, 10, generator=self._generator(f"{name}'s zeros"))
        scales_BG = torch.empty(-(-N // rows), K // group, device=self._device)
        each = _STANDARD_DEVIATION / deviation
        scales_BG.uniform_(0.5 * each, 1.5 * each, generator=self._generator(f"{name}'s scales"))
        scales_BG = scales_BG.to(of_scales).float()
        return ScaledRows(numbers_NK, scales_BG.repeat_interleave(rows, 0)[:N], zeros_NG)

    def _mx_rows(self, name: str, num_rows: int, num_groups: int) -> ScaledRows:
        generator = self._generator(name)
        codes = torch.empty(num_rows, num_groups * MX_GROUP, dtype=torch.uint8, device=self._device)
        powers = torch.empty(num_rows, num_groups, dtype=torch.uint8, device=self._device)
        powers.random_(*_MX_POWERS, generator=generator)
        return ScaledRows(codes.random_(0, 16, generator=generator), powers.view(E8M0), None)

    def _generator(self, what: str) -> torch.Generator:
        generator = torch.Generator(self._device)
        generator.manual_seed((self._seed + zlib.crc32(what.encode())) % 2**63)
        return generator


def _stored_as(quantization: Quantization, name: str, columns: int, dtype: torch.dtype) -> tuple[StoredAs, int] | None:
    """None: plain, as what is stored in other ways is once it is read."""
    if not quantization.is_fp8 and (quantization.bits != 4 or quantization.ordered):
        return None
    if quantization.way == "mxfp4":
        return (StoredAs(4, MX_GROUP, E8M0), 1) if ".experts." in name and columns % MX_GROUP == 0 else None
    rows, group = quantization.block or (1, quantization.group_size or columns)
    group = min(group, columns)
    way = StoredAs(8, group, torch.float32) if quantization.is_fp8 else StoredAs(4, group, dtype)
    return None if columns % group else (way, rows)
