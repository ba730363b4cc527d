"""Quantized matrices of a checkpoint as the numbers they stand for, whatever way a module's tensors hold them.

A number is (stored - zero) * scale, in fp32, to be rounded once; columns come in groups that share a zero and a scale.
Packed numbers lie in words of 32 bits, the lowest bits first. Knows tensors; reads no file (`expanded_checkpoint.py`).

Shape suffixes: R rows of a piece, I input columns, G groups of columns, W words, N numbers.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from tercet.model.quantization import Quantization
from tercet.triton_kernels.checks import FP8

_PIECE_NUMBERS = 2**22
"""Of one piece, unless a row is longer: expanding needs several times their memory."""
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


class QuantizedMatrix(Protocol):
    """Of `shape`, made of `parts`."""

    shape: tuple[int, int]
    parts: frozenset[str]

    def rows(self, start: int, stop: int) -> Iterator[Tensor]:
        """Some at a time, in fp32."""
        ...


class ScaledMatrix:
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
        if self._zero and shapes[self._zero] != shapes[self._scale]:
            raise stored.wrong(self._zero, f"the scale's shape, {list(shapes[self._scale])}")

    @property
    def fp8_group(self) -> int | None:
        """How many columns share a scale; None unless numbers are FP8 that stand for themselves times it."""
        is_fp8 = self._stored.dtype("weight") is FP8 and self._zero is None
        return min(self._block[1], self.shape[1]) if is_fp8 else None

    def rows(self, start: int, stop: int) -> Iterator[Tensor]:
        group_I = torch.arange(self.shape[1]) // self._block[1]
        for first, last, numbers_RI, scales_RG in self._scaled(start, stop):
            zeros_RG = self._of_rows(self._zero, first, last) if self._zero else None
            yield _expanded(numbers_RI.float(), zeros_RG, scales_RG, group_I)

    def scaled_rows(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Some at a time, as they are stored, beside their groups' scales in fp32."""
        for _, _, numbers_RI, scales_RG in self._scaled(start, stop):
            yield numbers_RI, scales_RG

    def _scaled(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        for first, last in _steps(start, stop, self.shape[1]):
            yield first, last, self._stored.slice("weight", 0, first, last), self._of_rows(self._scale, first, last)

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


class PackedMatrix:
    """Rows of words; zeros, where there are any, packed the other way. From 0 on: half of their range is taken off."""

    def __init__(self, stored: Stored, *, ordered: bool) -> None:
        shapes = stored.shapes()
        self._stored = stored
        self._zero = "weight_zero_point" in shapes
        self._index = ordered or "weight_g_idx" in shapes
        extras = [*(["weight_zero_point"] if self._zero else []), *(["weight_g_idx"] if self._index else [])]
        self.parts = frozenset({"weight_packed", "weight_scale", "weight_shape", *extras})
        if lacking := self.parts - shapes.keys():
            raise stored.wrong("weight_packed", f"{', '.join(sorted(lacking))} beside it")
        self.shape, self._bits = self._unpacked_shape()
        rows, columns = self.shape
        self._groups = _two(stored, "weight_scale")[1]
        if shapes["weight_scale"] != (rows, self._groups) or columns % self._groups:
            raise stored.wrong("weight_scale", f"{rows} rows of groups of which {columns} columns are a multiple")
        zeros = (-(-rows * self._bits // 32), self._groups)
        if self._zero and _words(stored, "weight_zero_point") != zeros:
            raise stored.wrong("weight_zero_point", f"{zeros[0]} x {zeros[1]} words")
        if self._index and shapes["weight_g_idx"] != (columns,):
            raise stored.wrong("weight_g_idx", f"a group's number for each of {columns} columns")

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

    def rows(self, start: int, stop: int) -> Iterator[Tensor]:
        rows, columns = self.shape
        group_I = _groups(self._stored, "weight_g_idx" if self._index else None, columns, self._groups)
        zeros_OG = None
        if self._zero:
            packed = self._stored.slice("weight_zero_point", 0, 0, -(-rows * self._bits // 32))
            zeros_OG = _unpacked(packed.T, self._bits).T
        for first, last in _steps(start, stop, columns):
            words = self._stored.slice("weight_packed", 0, first, last)
            numbers_RI = _unpacked(words, self._bits)[:, :columns]
            scales_RG = self._stored.slice("weight_scale", 0, first, last).float()
            zeros_RG = torch.full_like(scales_RG, 2 ** (self._bits - 1)) if zeros_OG is None else zeros_OG[first:last]
            yield _expanded(numbers_RI, zeros_RG, scales_RG, group_I)


class TransposedMatrix:
    """Columns of what others have as rows, as GPTQ and AWQ store it: GPTQ's words go down, AWQ's go across."""

    def __init__(self, stored: Stored, quantization: Quantization) -> None:
        shapes = stored.shapes()
        self._stored = stored
        self._settings = quantization
        self._index = quantization.ordered or ("g_idx" in shapes and quantization.way == "gptq")
        self.parts = frozenset({"qweight", "qzeros", "scales", *(["g_idx"] if self._index else [])})
        if lacking := self.parts - shapes.keys():
            raise stored.wrong("qweight", f"{', '.join(sorted(lacking))} beside it")
        down, across = _words(stored, "qweight")
        each = 32 // quantization.bits
        columns, rows = (down * each, across) if quantization.way == "gptq" else (down, across * each)
        self.shape = rows, columns
        self._groups = -(-columns // (quantization.group_size or columns))
        if shapes["scales"] != (self._groups, rows):
            raise stored.wrong("scales", f"{self._groups} groups of {rows}")
        if _words(stored, "qzeros") != (self._groups, -(-rows // each)):
            raise stored.wrong("qzeros", f"{self._groups} groups of {-(-rows // each)} words")
        if self._index and shapes["g_idx"] != (columns,):
            raise stored.wrong("g_idx", f"a group's number for each of {columns} columns")

    def rows(self, start: int, stop: int) -> Iterator[Tensor]:
        stored, columns, bits = self._stored, self.shape[1], self._settings.bits
        down = self._settings.way == "gptq"
        size = self._settings.group_size or columns
        group_I = _groups(stored, "g_idx" if self._index else None, columns, self._groups, size)
        scales_RG = stored.slice("scales", 1, start, stop).T.float()
        zeros_RG = self._across("qzeros", start, stop).T
        zeros_RG = (zeros_RG + self._settings.zero_offset) % 2**bits
        packed = stored.slice("qweight", 1, start, stop).T.contiguous() if down else None
        for first, last in _steps(start, stop, columns):
            piece = slice(first - start, last - start)
            numbers_RI = self._across("qweight", first, last).T if packed is None else _unpacked(packed[piece], bits)
            yield _expanded(numbers_RI, zeros_RG[piece], scales_RG[piece], group_I)

    def _across(self, part: str, start: int, stop: int) -> Tensor:
        """Columns `start:stop` of numbers, whose words go across."""
        settings = self._settings
        each = 32 // settings.bits
        words = self._stored.slice(part, 1, start // each, -(-stop // each))
        numbers = _unpacked(words, settings.bits, _AWQ_PLACES if settings.way == "awq" else None)
        return numbers[:, start % each :][:, : stop - start]


def _expanded(numbers_RI: Tensor, zeros_RG: Tensor | None, scales_RG: Tensor, group_I: Tensor) -> Tensor:
    size, left = divmod(numbers_RI.shape[1], scales_RG.shape[1])
    if not left and torch.equal(group_I, torch.arange(len(group_I)) // size):  # as nearly always: to index takes longer
        numbers = numbers_RI.unflatten(1, (-1, size))
        scales = scales_RG[..., None]
        zeros = None if zeros_RG is None else zeros_RG[..., None]
    else:
        group_I = group_I.to(numbers_RI.device)
        numbers, scales = numbers_RI, scales_RG[:, group_I]
        zeros = None if zeros_RG is None else zeros_RG[:, group_I]
    expanded: Tensor = (numbers if zeros is None else numbers - zeros) * scales
    return expanded.reshape(numbers_RI.shape)


def _unpacked(words_NW: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """The numbers in the rows' words, one after the other, or each at its place."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words_NW.device)
    if places is not None:
        shifts = shifts[list(places)]
    numbers: Tensor = (words_NW[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


def _groups(stored: Stored, index: str | None, columns: int, groups: int, size: int = 0) -> Tensor:
    """Of each column; a number that is of no group is refused."""
    if index is None:
        return torch.arange(columns) // (size or columns // groups)
    group_I = stored.small(index).long()
    if not ((group_I >= 0) & (group_I < groups)).all():
        raise stored.wrong(index, f"numbers of {groups} groups")
    return group_I


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
