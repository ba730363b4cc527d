"""Files that have the matrices of all experts of a layer in one tensor, in eight bits, as if each had its own.

They lie as outputs by inputs, gates first and then what they multiply, and beside them their scales: one of each expert
or of each block. Reads nothing itself; what the numbers stand for is known by `quantized_matrices.py`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.model.weights import Files, misfit

_STACK = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(|_scale_inv)")
_OF_ACTIVATIONS = "_proj_activation_scale"
"""Which nobody needs: activations keep the model's own type."""


class _Part(NamedTuple):
    """Of which tensor it is, of which expert, from which row on, and its shape."""

    stack: str
    expert: int | None
    """None: it is all of the tensor."""
    first: int
    shape: tuple[int, ...]


class UnstackedExperts:
    """As the files, but for experts. ValueError names what does not fit together."""

    def __init__(self, files: Files, block: tuple[int, int] | None) -> None:
        """`block`: rows and columns that share a scale, if it is not all of an expert's."""
        self.source = files.source
        self._files = files
        self._parts: dict[str, _Part] = {}
        for name, shape in files.shapes().items():
            if found := _STACK.fullmatch(name) if len(shape) == 3 else None:
                path, which, kind = found.groups()
                self._add(path, which, kind, name, shape, block)
            elif not name.endswith(_OF_ACTIVATIONS):
                self._parts[name] = _Part(name, None, 0, shape)

    def _add(
        self, path: str, which: str, kind: str, stack: str, shape: tuple[int, ...], block: tuple[int, int] | None
    ) -> None:
        """All experts', or their scales."""
        names = ("gate_proj", "up_proj") if which == "gate_up" else ("down_proj",)
        count, rows, columns = shape
        is_shared = bool(kind) and rows == 1
        each, left = (1, 0) if is_shared else divmod(rows, len(names))
        cuts_block = not kind and block is not None and len(names) > 1 and each % block[0] != 0
        if left or cuts_block:
            raise misfit(self._files, stack, f"as many rows of {' and of '.join(names)}, in whole blocks")
        for turn, name in enumerate(names):
            first = 0 if is_shared else turn * each
            for expert in range(count):
                self._parts[f"{path}.{expert}.{name}.weight{kind}"] = _Part(stack, expert, first, (each, columns))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: part.shape for name, part in self._parts.items()}

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The type that a tensor is stored in; None if there is no such tensor."""
        return self._files.dtype_of(self._parts[name].stack) if name in self._parts else None

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        stack, expert, first, shape = self._parts[name]
        if expert is None:
            yield from self._files.read(name, dim, start, stop)
            return
        for piece in self._files.read(stack, 0, expert, expert + 1):
            yield piece[0, first : first + shape[0]].narrow(dim, start, stop - start)
