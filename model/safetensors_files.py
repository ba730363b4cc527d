"""A folder's safetensors files as one `Checkpoint`: a single file, or shards with an index.

Knows the files; knows no model. Only the rows asked for are read, by system calls into memory that is used again and
may be pinned: from a mapping a GPU copies no faster than pages are mapped and a driver's thread copies them.
"""

import json
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

PLAIN = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Types of numbers that stand for themselves."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_PIECE_BYTES = 8 * 2**20
"""Of one read, unless a row is longer."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes are."""

    path: Path
    fd: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def shown(name: str) -> str:
    """In one line, whatever a file has as a name."""
    return name if name.isprintable() else ascii(name)


class SafetensorsCheckpoint:
    """All tensors of a folder. ValueError if there are none, or a file is missing, truncated or not readable."""

    def __init__(self, folder: Path, *, pinned: bool = False, only: str | None = None) -> None:
        """`pinned`: read into memory that a GPU copies from at full speed; `only`: of all files this one."""
        self.source = str(folder)
        self._pinned = pinned
        self._places: dict[str, _Place] = {}
        self._of_thread = threading.local()
        for path in [folder / only] if only else _paths(folder):
            self._open(path)
        if not only and (index := _index(folder)):
            self._check_index(folder, index)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._places.items()}

    def check_plain(self) -> None:
        """ValueError names a tensor whose numbers stand for others."""
        for name, place in self._places.items():
            if place.dtype not in PLAIN:
                kind = next(kind for kind, dtype in _DTYPES.items() if dtype is place.dtype)
                raise ValueError(
                    f"{place.path}: tensor {shown(name)} is of type {kind}, as quantized weights are; config.json has "
                    "no quantization_config that says how"
                )

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The type that a tensor is stored in; None if there is no such tensor."""
        place = self._places.get(name)
        return None if place is None else place.dtype

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        place = self._places[name]
        first, last = (start, stop) if dim == 0 else (0, place.shape[0])
        row_bytes = prod(place.shape[1:]) * place.dtype.itemsize
        each = max(_PIECE_BYTES // max(row_bytes, 1), 1)
        for row in range(first, last, each):
            num_rows = min(each, last - row)
            words = self._read_bytes(place, row * row_bytes, num_rows * row_bytes)
            piece = words.view(place.dtype).view(num_rows, *place.shape[1:])
            yield piece if dim == 0 else piece[:, start:stop]

    def _read_bytes(self, place: _Place, start: int, count: int) -> Tensor:
        """Into this thread's memory, which its next read overwrites."""
        memory: Tensor | None = getattr(self._of_thread, "memory", None)
        if memory is None or len(memory) < count:
            memory = torch.empty(max(count, _PIECE_BYTES), dtype=torch.uint8, pin_memory=self._pinned)
            self._of_thread.memory = memory
        view, done = memory.numpy().data, 0
        while done < count:
            got = os.preadv(place.fd, [view[done:count]], place.offset + start + done)
            if not got:
                raise ValueError(f"{place.path} is shorter than it was when it was opened")
            done += got
        return memory[:count]

    def _open(self, path: Path) -> None:
        try:
            safe_open(str(path), framework="pt", device="cpu")  # checks the whole header
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or not a readable safetensors file: {error}") from None
        weakref.finalize(self, os.close, fd)
        (header_bytes,) = struct.unpack("<Q", os.pread(fd, 8, 0))
        header: dict[str, Any] = json.loads(os.pread(fd, header_bytes, 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{path}: tensor {shown(name)} is of type {entry['dtype']}; supported: {', '.join(_DTYPES)}"
                )
            if name in self._places:
                raise ValueError(f"{path}: tensor {shown(name)} is also in another file of this folder")
            offset = 8 + header_bytes + entry["data_offsets"][0]
            self._places[name] = _Place(path, fd, offset, _DTYPES[entry["dtype"]], tuple(entry["shape"]))

    def _check_index(self, folder: Path, index: Mapping[str, str]) -> None:
        if lost := [name for name in index if name not in self._places]:
            raise ValueError(
                f"{folder}: the index names {len(lost)} tensors that its files lack, such as {shown(lost[0])}"
            )


def _paths(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if index := _index(folder):
        paths = [folder / name for name in sorted(set(index.values()))]
    elif single.exists():
        paths = [single]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no .safetensors file; weights are read from safetensors or GGUF only")
    if absent := [path.name for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{folder}: the index names files that are not there: {', '.join(map(shown, absent))}")
    return paths


def _index(folder: Path) -> dict[str, str]:
    """Tensor name to file name, of a sharded checkpoint; empty if it is not sharded."""
    path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not path.exists():
        return {}
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a readable index: {error!r}") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) and "/" not in name for name in names.values()):
        raise ValueError(f"{path}: weight_map must map tensor names to names of files beside it")
    return names
