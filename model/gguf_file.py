"""A GGUF file as a `Checkpoint`, dequantized while it is read.

Knows how tensors lie in the file. What they are called there and in which order their rows are is in `gguf_names.py`,
what the metadata means in `gguf_config.py`.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tercet.model.gguf_config import architecture, parse_metadata
from tercet.model.gguf_rope import FACTORS, LONG, SHORT
from tercet.model.shard import EMBEDDING

_PIECE_NUMBERS = 2**20
"""Of one read, unless a head's rows are more: dequantizing needs several times their memory."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file, or one of the experts whose matrices are stacked in it."""

    tensor: Any
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        # GGUF counts dimensions from the innermost.
        shape = tuple(int(n) for n in reversed(self.tensor.shape))
        return shape if self.expert is None else shape[1:]

    @property
    def data(self) -> Any:
        return self.tensor.data if self.expert is None else self.tensor.data[self.expert]


class GgufCheckpoint:
    """One .gguf file. ValueError if it is truncated, not GGUF, or holds a type that cannot be dequantized."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        reader = _open(path)
        metadata = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")
        }
        names = architecture(self.source, metadata)
        stored = {tensor.name: _Stored(tensor) for tensor in reader.tensors}
        factors = {name: stored.pop(name) for name in (FACTORS, SHORT, LONG) if name in stored}
        self._in_pairs = names.in_pairs
        self._stored = {
            hugging_face_name: _Stored(one.tensor, expert)
            for name, one in stored.items()
            for hugging_face_name, expert in names.hugging_face_names(name, one.shape).items()
        }
        self.config = parse_metadata(
            self.source,
            metadata,
            names.family,
            self.shapes(),
            {name: tuple(self._dequantized(name, one, one.data).tolist()) for name, one in factors.items()},
            self._dtype(),
        )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        stored = self._stored[name]
        shape = stored.shape
        first, last = (start, stop) if dim == 0 else (0, shape[0])
        # Whole heads, which may have to be put in order.
        each = max(_PIECE_NUMBERS // prod(shape[1:]) // self.config.head_dim, 1) * self.config.head_dim
        for row in range(first, last, each):
            # Quantization blocks lie along the rows: rows can be cut before, columns only after dequantizing.
            values = torch.from_numpy(self._dequantized(name, stored, stored.data[row : min(row + each, last)]))
            if dim == 1:
                yield values[:, start:stop]
            elif self._in_pairs and name.split(".")[-2] in ("q_proj", "k_proj"):
                yield self._unpermute(values)
            else:
                yield values

    def _unpermute(self, values: Tensor) -> Tensor:
        """Back from rotation pairs side by side to the two halves of each head; pieces hold whole heads."""
        half = self.config.head_dim // 2
        return values.view(-1, half, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)

    def _dequantized(self, name: str, stored: _Stored, data: Any) -> Any:
        return _dequantize(data, stored.tensor.tensor_type, self.source, name)

    def _dtype(self) -> torch.dtype:
        """Of the matrices; quantized ones have none, and bfloat16 holds any of them."""
        kinds = {one.tensor.tensor_type.name for one in self._stored.values() if len(one.shape) == 2}
        if EMBEDDING in self._stored and kinds <= _PLAIN.keys():
            return _PLAIN[self._stored[EMBEDDING].tensor.tensor_type.name]
        return torch.bfloat16


def read_tokens(path: Path) -> list[str]:
    """A file's vocabulary."""
    field = _open(path).get_field("tokenizer.ggml.tokens")
    tokens = None if field is None else field.contents()
    if not isinstance(tokens, list):
        raise ValueError(f"{path} has no tokenizer.ggml.tokens; want a file with a vocabulary")
    return tokens


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError:
        raise ValueError(f"{path}: reading GGUF needs the package gguf: pip install 'tercet[demo]'") from None

    class PlainReader(GGUFReader):  # type: ignore[misc]
        """Reads through a plain array: slicing a np.memmap, once for every string of the vocabulary, takes 3 times as
        long as all the rest. Numbers of a list are one array, and its strings two slices each: theirs were a second."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            parts, at, element = [kind, count], orig_offs + 12, GGUFValueType(kind[0])
            if number := self.gguf_scalar_to_np.get(element):
                parts.append(self._get(at, number, count[0]))
                at += np.dtype(number).itemsize * int(count[0])
            elif element == GGUFValueType.STRING:
                length_at = struct.Struct(np.dtype(np.uint64).newbyteorder(self.byte_order).str[0] + "Q").unpack_from
                data: Any = self._data
                for _ in range(count[0]):
                    begin = at + 8
                    end = begin + length_at(data, at)[0]
                    parts += data[at:begin], data[begin:end]
                    at = end
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            values = range(2 if number else 3, len(parts), 1 if number else 2)
            return at - orig_offs, parts, list(values), [GGUFValueType.ARRAY, element]

    try:
        return PlainReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, struct.error) as error:
        raise ValueError(f"{path} is truncated or not a readable GGUF file: {error}") from None


def _dequantize(data: Any, kind: Any, source: str, name: str) -> Any:
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(data, kind), dtype=np.float32)
    except NotImplementedError:
        raise ValueError(f"{source}: tensor {name} is of type {kind.name}, which cannot be dequantized") from None
