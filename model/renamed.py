"""A checkpoint by other names than its files have."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tercet.model.shard import EMBEDDING, LM_HEAD
from tercet.model.weights import Files

_BASE = "model."


class Renamed:
    """As the files, of which it has those tensors that it has a name for."""

    def __init__(self, files: Files, names: Mapping[str, str]) -> None:
        """`names`: what files call a tensor, by its name here."""
        self.source = files.source
        self._files, self._names = files, names

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._files.shapes()
        return {ours: shapes[theirs] for ours, theirs in self._names.items()}

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The type that a tensor is stored in; None if there is no such tensor."""
        return self._files.dtype_of(self._names[name]) if name in self._names else None

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        return self._files.read(self._names[name], dim, start, stop)


def is_bare(files: Files) -> bool:
    """Whether names lack their usual beginning, as they do where a model was saved without what makes logits."""
    names = files.shapes()
    return EMBEDDING not in names and EMBEDDING.removeprefix(_BASE) in names


def with_base(files: Files) -> Files:
    """By usual names, if they are bare."""
    if not is_bare(files):
        return files
    return Renamed(files, {name if name == LM_HEAD else f"{_BASE}{name}": name for name in files.shapes()})
