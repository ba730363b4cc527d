"""Quantized matrices of a checkpoint as the numbers they stand for, whatever way a module's tensors hold them.

Columns come in groups that share a zero and a scale (`scaled_rows.py`). Packed numbers lie in words of 32 bits, the
lowest bits first. Knows tensors; reads no file (`expanded_checkpoint.py`).

Shape suffixes: R rows of a piece, I input columns, G groups of columns, W words, N numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from tercet.model.quantization import Quantization
from tercet.model.scaled_rows import ScaledRows, StoredAs
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.scaled_weight import MX_NUMBERS

_PIECE_NUMBERS = 2**22
"""Of one piece, unless a row is longer: expanding needs several times their memory."""
_NVFP4_GROUP = 16
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ puts eight neighbours."""


class Stored(Protocol):
    """A module's tensors as they are in the files."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def dtype(self, part: str) -> torch.dtype: ...

    def slice(self, part: str, dim: int, start: int, stop: int) -> Tensor:
        """On the device that is to have the weights."""
        ...

    def small(self, part: str) -> Tensor:
        """All of a small one, on the CPU."""
        ...

    def wrong(self, part: str, wanted: str) -> ValueError:
        """What the part is, and what is wanted."""
        ...


class QuantizedMatrix(ABC):
    """Of `shape`, made of `parts`."""

    shape: tuple[int, int]
    parts: frozenset[str]
    _stored: Stored
    _kept_bits: int | None
    """Of a number, if products read numbers of that kind."""
    _scale: str
    """The part that has scales."""
    _groups: int
    """Of columns."""
    _group_size: int
    _index: str | None
    """The part that tells each column's group; None: they are neighbours, the last group may have fewer."""

    def rows(self, start: int, stop: int) -> Iterator[Tensor]:
        """Some at a time, in fp32."""
        group_I = self._group_of_columns()
        where = None if self._are_alike(group_I) else group_I
        for piece in self.scaled_rows(start, stop):
            yield piece.expanded(where)

    @abstractmethod
    def scaled_rows(self, start: int, stop: int) -> Iterator[ScaledRows]:
        """Some at a time, as they are stored."""

    def stored_as(self) -> StoredAs | None:
        """How, if it may be kept so."""
        if self._kept_bits is None or not self._are_alike(self._group_of_columns()):
            return None
        return StoredAs(self._kept_bits, self.shape[1] // self._groups, self._stored.dtype(self._scale))

    def _group_of_columns(self) -> Tensor:
        """A number that is of no group is refused."""
        if self._index is None:
            return torch.arange(self.shape[1]) // self._group_size
        group_I = self._stored.small(self._index).long()
        if not ((group_I >= 0) & (group_I < self._groups)).all():
            raise self._stored.wrong(self._index, f"numbers of {self._groups} groups")
        return group_I

    def _are_alike(self, group_I: Tensor) -> bool:
        """Whether groups follow each other, with as many columns in each."""
        size, left = divmod(self.shape[1], self._groups)
        return not left and torch.equal(group_I, torch.arange(self.shape[1]) // size)


class ScaledMatrix(QuantizedMatrix):
    """A number each in 8 bits, beside scales of all, of rows, of groups in rows, or of blocks."""

    def __init__(self, stored: Stored, block: tuple[int, int] | None) -> None:
        shapes = stored.shapes()
        self._stored = stored
        self._scale = "weight_scale_inv" if "weight_scale_inv" in shapes else "weight_scale"
        self._zero = "weight_zero_point" if "weight_zero_point" in shapes else None
        self.parts = frozenset({"weight", self._scale, *([self._zero] if self._zero else [])})
        self.shape = _two(stored, "weight")
        if self._scale not in shapes:
            raise stored.wrong("weight", "a weight_scale beside it")
        self._block = self._shared(shapes[self._scale], block)
        self._group_size, self._index = self._block[1], None
        self._groups = -(-self.shape[1] // self._group_size)
        self._kept_bits = 8 if stored.dtype("weight") is FP8 and self._zero is None else None
        if self._zero and shapes[self._zero] != shapes[self._scale]:
            raise stored.wrong(self._zero, f"the scale's shape, {list(shapes[self._scale])}")

    def scaled_rows(self, start: int, stop: int) -> Iterator[ScaledRows]:
        for first, last in _steps(start, stop, self.shape[1]):
            zeros_RG = self._of_rows(self._zero, first, last) if self._zero else None
            numbers_RI = self._stored.slice("weight", 0, first, last)
            yield ScaledRows(numbers_RI, self._of_rows(self._scale, first, last), zeros_RG)

    def _of_rows(self, part: str, first: int, last: int) -> Tensor:
        each = self._block[0]
        above = first // each
        shared = self._stored.slice(part, 0, above, -(-last // each)).float()
        shared = shared.reshape(len(shared), -1)
        return shared[(torch.arange(first, last, device=shared.device) // each) - above]

    def _shared(self, scale: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int]:
        """How many rows and columns share a scale."""
        rows, columns = self.shape
        if block is not None and scale == (-(-rows // block[0]), -(-columns // block[1])):
            return block
        if scale in ((), (1,), (1, 1)):
            return rows, columns
        if scale == (rows,) or (len(scale) == 2 and scale[0] == rows and scale[1] and columns % scale[1] == 0):
            return 1, columns // scale[-1] if len(scale) == 2 else columns
        blocks = "" if block is None else f", or of blocks of {block[0]} x {block[1]}"
        raise self._stored.wrong(self._scale, f"one of all {rows} x {columns} numbers, of rows, of groups{blocks}")


class FourBitFloats(QuantizedMatrix):
    """NVFP4: two numbers of four bits to a byte, a scale in FP8 for 16 of a row, and one for all: scales times that as
    ModelOpt has it, divided by it as compressed-tensors does."""

    def __init__(self, stored: Stored) -> None:
        shapes = stored.shapes()
        self._stored = stored
        self._divides = "weight_global_scale" in shapes
        self._numbers, self._of_all = "weight", "weight_scale_2"
        if self._divides:
            self._numbers, self._of_all = "weight_packed", "weight_global_scale"
        self._scale, self._index, self._kept_bits = "weight_scale", None, None
        self.parts = frozenset({self._numbers, self._scale, self._of_all})
        if lacking := self.parts - shapes.keys():
            raise stored.wrong(self._of_all, f"{', '.join(sorted(lacking))} beside it")
        if stored.dtype(self._numbers) is not torch.uint8:
            raise stored.wrong(self._numbers, "bytes of type U8")
        if stored.dtype(self._scale) is not FP8:
            raise stored.wrong(self._scale, "numbers of type F8_E4M3")
        rows, half = _two(stored, self._numbers)
        self.shape, self._group_size = (rows, 2 * half), _NVFP4_GROUP
        self._groups = 2 * half // _NVFP4_GROUP
        if 2 * half % _NVFP4_GROUP or shapes[self._scale] != (rows, self._groups):
            raise stored.wrong(self._scale, f"{rows} rows of one for {_NVFP4_GROUP} of {2 * half} numbers")
        if shapes[self._of_all] not in ((), (1,)):
            raise stored.wrong(self._of_all, "one number")

    def scaled_rows(self, start: int, stop: int) -> Iterator[ScaledRows]:
        of_all = self._stored.slice(self._of_all, 0, 0, 1).float().reshape(1, 1)
        meant = torch.tensor([*MX_NUMBERS, *(-number for number in MX_NUMBERS)], device=of_all.device)
        for first, last in _steps(start, stop, self.shape[1]):
            bytes_RJ = self._stored.slice(self._numbers, 0, first, last)
            codes_RI = torch.stack((bytes_RJ & 15, bytes_RJ >> 4), 2).flatten(1)
            scales_RG = self._stored.slice(self._scale, 0, first, last).float()
            scales_RG = scales_RG / of_all if self._divides else scales_RG * of_all
            yield ScaledRows(meant[codes_RI.int()], scales_RG, None)


class PackedMatrix(QuantizedMatrix):
    """Rows of words; zeros, where there are any, packed the other way. From 0 on: half of their range is taken off."""

    def __init__(self, stored: Stored, *, ordered: bool) -> None:
        shapes = stored.shapes()
        self._stored = stored
        self._scale, self._zero = "weight_scale", "weight_zero_point" in shapes
        self._index = "weight_g_idx" if ordered or "weight_g_idx" in shapes else None
        extras = [*(["weight_zero_point"] if self._zero else []), *([self._index] if self._index else [])]
        self.parts = frozenset({"weight_packed", "weight_scale", "weight_shape", *extras})
        if lacking := self.parts - shapes.keys():
            raise stored.wrong("weight_packed", f"{', '.join(sorted(lacking))} beside it")
        self.shape, self._bits = self._unpacked_shape()
        self._kept_bits = 4 if self._bits == 4 else None
        rows, columns = self.shape
        self._groups = _two(stored, self._scale)[1]
        if shapes[self._scale] != (rows, self._groups) or columns % self._groups:
            raise stored.wrong(self._scale, f"{rows} rows of groups of which {columns} columns are a multiple")
        self._group_size = columns // self._groups
        zeros = (-(-rows * self._bits // 32), self._groups)
        if self._zero and _words(stored, "weight_zero_point") != zeros:
            raise stored.wrong("weight_zero_point", f"{zeros[0]} x {zeros[1]} words")
        if self._index and shapes[self._index] != (columns,):
            raise stored.wrong(self._index, f"a group's number for each of {columns} columns")

    def _unpacked_shape(self) -> tuple[tuple[int, int], int]:
        """And how many bits a number has."""
        rows, words = _words(self._stored, "weight_packed")
        if self._stored.shapes()["weight_shape"] != (2,):
            raise self._stored.wrong("weight_shape", "two numbers")
        said, columns = self._stored.small("weight_shape").tolist()
        for bits in (4, 8):
            if said == rows and words == -(-columns * bits // 32):
                return (rows, columns), bits
        raise self._stored.wrong("weight_packed", f"words of 8 or of 4 numbers for {said} x {columns} of them")

    def scaled_rows(self, start: int, stop: int) -> Iterator[ScaledRows]:
        rows, columns = self.shape
        zeros_OG = None
        if self._zero:
            packed = self._stored.slice("weight_zero_point", 0, 0, -(-rows * self._bits // 32))
            zeros_OG = _unpacked(packed.T, self._bits).T
        for first, last in _steps(start, stop, columns):
            words = self._stored.slice("weight_packed", 0, first, last)
            numbers_RI = _unpacked(words, self._bits)[:, :columns]
            scales_RG = self._stored.slice(self._scale, 0, first, last).float()
            zeros_RG = torch.full_like(scales_RG, 2 ** (self._bits - 1)) if zeros_OG is None else zeros_OG[first:last]
            yield ScaledRows(numbers_RI, scales_RG, zeros_RG)


class TransposedMatrix(QuantizedMatrix):
    """Columns of what others have as rows, as GPTQ and AWQ store it: GPTQ's words go down, AWQ's go across."""

    def __init__(self, stored: Stored, quantization: Quantization) -> None:
        shapes = stored.shapes()
        self._stored = stored
        self._settings, self._scale = quantization, "scales"
        self._kept_bits = 4 if quantization.bits == 4 else None
        self._index = "g_idx" if quantization.ordered or ("g_idx" in shapes and quantization.way == "gptq") else None
        self.parts = frozenset({"qweight", "qzeros", "scales", *([self._index] if self._index else [])})
        if lacking := self.parts - shapes.keys():
            raise stored.wrong("qweight", f"{', '.join(sorted(lacking))} beside it")
        down, across = _words(stored, "qweight")
        each = 32 // quantization.bits
        columns, rows = (down * each, across) if quantization.way == "gptq" else (down, across * each)
        self.shape = rows, columns
        self._group_size = quantization.group_size or columns
        self._groups = -(-columns // self._group_size)
        if shapes[self._scale] != (self._groups, rows):
            raise stored.wrong(self._scale, f"{self._groups} groups of {rows}")
        if _words(stored, "qzeros") != (self._groups, -(-rows // each)):
            raise stored.wrong("qzeros", f"{self._groups} groups of {-(-rows // each)} words")
        if self._index and shapes[self._index] != (columns,):
            raise stored.wrong(self._index, f"a group's number for each of {columns} columns")

    def scaled_rows(self, start: int, stop: int) -> Iterator[ScaledRows]:
        stored, bits = self._stored, self._settings.bits
        down = self._settings.way == "gptq"
        scales_RG = stored.slice(self._scale, 1, start, stop).T.float()
        zeros_RG = self._across("qzeros", start, stop).T
        zeros_RG = (zeros_RG + self._settings.zero_offset) % 2**bits
        packed = stored.slice("qweight", 1, start, stop).T.contiguous() if down else None
        for first, last in _steps(start, stop, self.shape[1]):
            piece = slice(first - start, last - start)
            numbers_RI = self._across("qweight", first, last).T if packed is None else _unpacked(packed[piece], bits)
            yield ScaledRows(numbers_RI, scales_RG[piece], zeros_RG[piece])

    def _across(self, part: str, start: int, stop: int) -> Tensor:
        """Columns `start:stop` of numbers, whose words go across."""
        settings = self._settings
        each = 32 // settings.bits
        words = self._stored.slice(part, 1, start // each, -(-stop // each))
        numbers = _unpacked(words, settings.bits, _AWQ_PLACES if settings.way == "awq" else None)
        return numbers[:, start % each :][:, : stop - start]


def _unpacked(words_NW: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """The numbers in the rows' words, one after the other, or each at its place."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words_NW.device)
    if places is not None:
        shifts = shifts[list(places)]
    numbers: Tensor = (words_NW[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


def _steps(start: int, stop: int, columns: int) -> Iterator[tuple[int, int]]:
    each = max(_PIECE_NUMBERS // columns, 1)
    for first in range(start, stop, each):
        yield first, min(first + each, stop)


def _two(stored: Stored, part: str) -> tuple[int, int]:
    shape = stored.shapes()[part]
    if len(shape) != 2 or 0 in shape:
        raise stored.wrong(part, "rows and columns")
    return shape[0], shape[1]


def _words(stored: Stored, part: str) -> tuple[int, int]:
    if stored.dtype(part) is not torch.int32:
        raise stored.wrong(part, "words of type I32")
    return _two(stored, part)
