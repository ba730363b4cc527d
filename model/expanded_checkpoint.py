"""A checkpoint of quantized weights as one of plain numbers, which it makes of them while they are read.

What may be kept as it is stored it also gives so. Knows which tensors belong together by their names; what
they mean is known by `quantized_matrices.py`.
"""

import logging
from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from tercet.model.quantization import Quantization
from tercet.model.quantized_matrices import (
    FourBitFloats,
    PackedMatrix,
    QuantizedMatrix,
    ScaledMatrix,
    TransposedMatrix,
)
from tercet.model.safetensors_files import PLAIN
from tercet.model.scaled_rows import Kept, ScaledRows
from tercet.model.weights import Files, misfit

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_OF_ACTIVATIONS = {"input_scale", "input_global_scale", "activation_scale", "input_zero_point"}
"""Not needed: activations keep the model's own type."""
_OF_THE_CACHE = {"q_scale", "k_scale", "v_scale", "output_scale"}


class ExpandedCheckpoint:
    """As the files, but for quantized matrices. ValueError names what does not fit together."""

    def __init__(self, files: Files, quantization: Quantization, device: torch.device) -> None:
        """`device`: where numbers are made, which the weights are for."""
        self.source = files.source
        self._files = files
        self._matrices: dict[str, QuantizedMatrix] = {}
        self._plain: dict[str, tuple[int, ...]] = {}
        modules: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in files.shapes().items():
            path, _, part = name.rpartition(".")
            modules.setdefault(path, {})[part] = shape
        for path, shapes in modules.items():
            module = _Module(files, path, shapes, device)
            matrix = _matrix(module, quantization)
            if matrix is not None:
                self._matrices[f"{path}.weight"] = matrix
            for part in shapes.keys() - (matrix.parts if matrix is not None else ()) - _OF_ACTIVATIONS - _OF_THE_CACHE:
                if module.dtype(part) not in PLAIN:
                    raise module.wrong(part, "plain numbers, or what belongs to them beside it")
                self._plain[f"{path}.{part}" if path else part] = shapes[part]
        if any(not _OF_THE_CACHE.isdisjoint(shapes) for shapes in modules.values()):
            log.warning("%s: its scales of keys and values are not used: an FP8 cache has none here", self.source)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._plain | {name: matrix.shape for name, matrix in self._matrices.items()}

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        matrix = self._matrices.get(name)
        if matrix is None:
            yield from self._files.read(name, dim, start, stop)
        elif dim == 0:
            yield from matrix.rows(start, stop)
        else:
            for piece in matrix.rows(0, matrix.shape[0]):
                yield piece[:, start:stop]

    def quantized(self) -> Set[str]:
        return self._matrices.keys()

    def stored_as(self) -> Kept:
        ways = {name: matrix.stored_as() for name, matrix in self._matrices.items()}
        return {name: way for name, way in ways.items() if way is not None}

    def read_scaled(self, name: str, dim: int, start: int, stop: int) -> Iterator[ScaledRows]:
        matrix = self._matrices[name]
        if dim == 0:
            yield from matrix.scaled_rows(start, stop)
        else:
            for piece in matrix.scaled_rows(0, matrix.shape[0]):
                yield piece.columns(start, stop)


class _Module:
    """What `quantized_matrices.py` sees of a module."""

    def __init__(self, files: Files, name: str, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self._files, self._name, self._shapes, self._device = files, name, shapes, device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, part: str) -> torch.dtype:
        dtype = self._files.dtype_of(f"{self._name}.{part}")
        assert dtype is not None
        return dtype

    def slice(self, part: str, dim: int, start: int, stop: int) -> Tensor:
        return self._copied(self._device, part, dim, start, stop)

    def small(self, part: str) -> Tensor:
        return self._copied(_CPU, part, 0, 0, self._shapes[part][0])

    def _copied(self, device: torch.device, part: str, dim: int, start: int, stop: int) -> Tensor:
        # What comes is overwritten by the next read.
        read = self._files.read(f"{self._name}.{part}", dim, start, stop)
        pieces = [piece.to(device, copy=True) for piece in read]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def wrong(self, part: str, wanted: str) -> ValueError:
        return misfit(self._files, f"{self._name}.{part}", wanted)


def _matrix(module: _Module, quantization: Quantization) -> QuantizedMatrix | None:
    """None: the module's tensors are plain."""
    parts = module.shapes()
    if "weight_scale_2" in parts or "weight_global_scale" in parts:
        return FourBitFloats(module)
    match quantization.way:
        case "gptq" | "awq":
            return TransposedMatrix(module, quantization) if "qweight" in parts else None
        case "compressed" if "weight_packed" in parts:
            return PackedMatrix(module, ordered=quantization.ordered)
    is_plain = "weight" not in parts or module.dtype("weight") in PLAIN
    return None if is_plain else ScaledMatrix(module, quantization.block)
