"""A folder's safetensors files as one `Checkpoint`: a single file, or shards with an index.

Knows the files; knows no model. Tensors are read through the file mapping, so only the slices asked for are touched.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """All tensors of a folder. ValueError if there are none, or a file is missing, truncated or not readable."""

    def __init__(self, folder: Path) -> None:
        self.source = str(folder)
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _paths(folder):
            self._open(path)
        if index := _index(folder):
            self._check_index(folder, index)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        whole = self._files[name].get_slice(name)
        piece: Tensor = whole[start:stop] if dim == 0 else whole[:, start:stop]
        return piece

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or not a readable safetensors file: {error}") from None
        for name in file.keys():  # noqa: SIM118 (a safetensors file is not iterable)
            view = file.get_slice(name)
            if view.get_dtype() not in _FLOATS:
                raise ValueError(
                    f"{path}: tensor {name} is of type {view.get_dtype()}; supported: {', '.join(_FLOATS)} "
                    f"(quantized checkpoints are not)"
                )
            if name in self._shapes:
                raise ValueError(f"{path}: tensor {name} is also in another file of this folder")
            self._shapes[name] = tuple(view.get_shape())
            self._files[name] = file

    def _check_index(self, folder: Path, index: Mapping[str, str]) -> None:
        if lost := [name for name in index if name not in self._shapes]:
            raise ValueError(f"{folder}: the index names {len(lost)} tensors that its files lack, such as {lost[0]}")


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
    if absent := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{folder}: the index names files that are not there: {', '.join(absent)}")
    return paths


def _index(folder: Path) -> dict[str, str]:
    """Tensor name to file name, of a sharded checkpoint; empty if it is not sharded."""
    path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not path.exists():
        return {}
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a readable index: {error!r}") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) and "/" not in name for name in names.values()):
        raise ValueError(f"{path}: weight_map must map tensor names to names of files beside it")
    return names
