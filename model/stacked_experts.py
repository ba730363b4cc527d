"""A checkpoint that has the matrices of all experts of a layer in one tensor, as one in which each has its own.

In plain numbers they lie there as inputs by outputs, gates and what they multiply in turns; or as outputs by inputs or
inputs by outputs, all gates first. In MXFP4 they lie as outputs by inputs: blocks of 32 numbers of four bits, two in a
byte, and a power of two for each block.

Shape suffixes: R rows (outputs), I inputs, G groups of them.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tercet.model.safetensors_files import PLAIN
from tercet.model.scaled_rows import Kept, ScaledRows, StoredAs
from tercet.model.weights import Files, misfit
from tercet.triton_kernels.scaled_weight import E8M0, MX_GROUP

Lie = Literal["in turns", "outputs first", "inputs first"]


class _Matrix(NamedTuple):
    """One expert's: in which tensor it lies, as which of it, and how; rows and columns."""

    stack: str
    expert: int
    shape: tuple[int, int]
    packed: bool = False
    """In MXFP4."""
    first: int | None = None
    """Of its outputs in the tensor, the one that it begins with; None: they are its own, by inputs."""
    inputs_first: bool = False
    """Where it begins somewhere: the tensor has inputs by outputs."""


class StackedExperts:
    """As the files, but for experts. ValueError names what does not fit together."""

    def __init__(self, files: Files, device: torch.device, lie: Lie) -> None:
        """`device`: where numbers are made, which the weights are for. `lie`: as what plain numbers do."""
        self.source = files.source
        self._files, self._device = files, device
        self._matrices: dict[str, _Matrix] = {}
        self._plain: dict[str, tuple[int, ...]] = {}
        shapes = files.shapes()
        for name, shape in shapes.items():
            path, _, last = name.rpartition(".experts.")
            if path and last.endswith("_proj") and len(shape) == 3:
                if lie == "in turns":
                    count, columns, rows = shape
                    self._add(f"{path}.experts", last, count, _Matrix(name, 0, (rows, columns)))
                else:
                    self._add_halves(f"{path}.experts", last, name, shape, inputs_first=lie == "inputs first")
            elif path and last.endswith("_proj_blocks"):
                stack = name.removesuffix("_blocks")
                self._check_packed(stack, shapes)
                count, rows, groups, _ = shape
                last = last.removesuffix("_blocks")
                matrix = _Matrix(stack, 0, (rows, groups * MX_GROUP), packed=True)
                self._add(f"{path}.experts", last, count, matrix)
            elif not (path and last.endswith("_proj_scales") and f"{name.removesuffix('scales')}blocks" in shapes):
                if files.dtype_of(name) not in PLAIN:
                    raise misfit(self._files, name, "plain numbers")
                self._plain[name] = shape

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._plain | {name: matrix.shape for name, matrix in self._matrices.items()}

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        matrix = self._matrices.get(name)
        if matrix is None:
            yield from self._files.read(name, dim, start, stop)
            return
        if matrix.packed:
            rows = self._packed_rows(matrix)
            yield rows.rows(start, stop).expanded() if dim == 0 else rows.expanded()[:, start:stop]
        elif matrix.first is None:
            yield self._of_expert(matrix.stack, matrix.expert).t().narrow(dim, start, stop - start)
        else:
            numbers = self._of_expert(matrix.stack, matrix.expert)
            numbers = numbers.t() if matrix.inputs_first else numbers
            yield numbers.narrow(0, matrix.first, matrix.shape[0]).narrow(dim, start, stop - start)

    def quantized(self) -> Set[str]:
        return {name for name, matrix in self._matrices.items() if matrix.packed}

    def stored_as(self) -> Kept:
        return dict.fromkeys(self.quantized(), StoredAs(4, MX_GROUP, E8M0))

    def read_scaled(self, name: str, dim: int, start: int, stop: int) -> Iterator[ScaledRows]:
        rows = self._packed_rows(self._matrices[name])
        yield rows.rows(start, stop) if dim == 0 else rows.columns(start, stop)

    def _packed_rows(self, matrix: _Matrix) -> ScaledRows:
        """All. Of a byte the low bits are first."""
        blocks_RGB = self._of_expert(f"{matrix.stack}_blocks", matrix.expert)
        scales_RG = self._of_expert(f"{matrix.stack}_scales", matrix.expert).view(E8M0)
        return ScaledRows(torch.stack((blocks_RGB & 15, blocks_RGB >> 4), -1).flatten(1), scales_RG, None)

    def _of_expert(self, stack: str, index: int) -> Tensor:
        """A copy: what comes is overwritten by the next read."""
        (piece,) = self._files.read(stack, 0, index, index + 1)
        return piece[0].to(self._device, copy=True)

    def _add(self, path: str, last: str, count: int, matrix: _Matrix) -> None:
        """All experts', which lie alike."""
        for index in range(count):
            self._matrices[f"{path}.{index}.{last}.weight"] = matrix._replace(expert=index)

    def _add_halves(self, path: str, last: str, stack: str, shape: tuple[int, ...], *, inputs_first: bool) -> None:
        """Those for gates and those that they multiply have names of their own."""
        count, rows, columns = shape
        if inputs_first:
            rows, columns = columns, rows
        both = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for turn, name in enumerate(both):
            size = rows // len(both)
            self._add(
                path, name, count, _Matrix(stack, 0, (size, columns), first=turn * size, inputs_first=inputs_first)
            )

    def _check_packed(self, stack: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        blocks, scales = f"{stack}_blocks", f"{stack}_scales"
        if self._files.dtype_of(blocks) is not torch.uint8 or len(shapes[blocks]) != 4 or shapes[blocks][3] != 16:
            raise misfit(self._files, blocks, "bytes of shape [experts, rows, groups, 16]")
        if scales not in shapes:
            raise misfit(self._files, blocks, f"{scales} beside it")
        if self._files.dtype_of(scales) is not torch.uint8 or shapes[scales] != shapes[blocks][:3]:
            raise misfit(self._files, scales, f"bytes of shape {list(shapes[blocks][:3])}")


def is_stacked(name: str) -> bool:
    """Whether a tensor holds the matrices of all experts of a layer, in one number each."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def how_they_lie(shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> Lie:
    """Where all gates come first. Versions of transformers write Qwen3-VL's either way; of a square tensor they take
    outputs to be first."""
    first = next((shape for name, shape in shapes.items() if name.endswith(".experts.gate_up_proj")), ())
    return "inputs first" if len(first) == 3 and first[1] == hidden_size != first[2] else "outputs first"
