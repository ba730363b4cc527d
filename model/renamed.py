"""A checkpoint by other names than its files have."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tercet.model.shard import EMBEDDING, LM_HEAD
from tercet.model.weights import Files

_BASE = "model."
_USUAL = {
    "attention_layernorm": "input_layernorm",
    "feedforward_layernorm": "post_attention_layernorm",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
}
"""What few families call as all others do otherwise."""


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


def by_usual_names(files: Files) -> Files:
    """Those that are bare, or whose modules are called otherwise than others'."""
    base = _BASE if is_bare(files) else ""
    names = {_usual(name, base): name for name in files.shapes()}
    return files if all(ours == theirs for ours, theirs in names.items()) else Renamed(files, names)


def _usual(name: str, base: str) -> str:
    path, _, part = name.rpartition(".")
    path, _, module = path.rpartition(".")
    if module in _USUAL:
        name = f"{path}.{_USUAL[module]}.{part}"
    return name if name == LM_HEAD else f"{base}{name}"
