"""A checkpoint of which a tensor's rows are several of those that are served, by names of their own.

Knows how Granite's hybrids and Nemotron-H call what others call otherwise; reads nothing itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.model.config_nemotron import Block
from tercet.model.weights import Files

_GRANITE = (
    (r"\.block_sparse_moe\.input_linear\.weight", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.layer\.weight", ".mlp.gate.weight"),
)


_WHOLE = {"model.embeddings.weight": "model.embed_tokens.weight", "model.norm_f.weight": "model.norm.weight"}
_PARTS = {"mamba": ("input_layernorm", "mamba"), "attention": ("input_layernorm", "self_attn")}
"""Of Nemotron-H: a norm's name, and that of what reads it."""


class _Rows(NamedTuple):
    """Of which tensor, from which row on, and the shape."""

    name: str
    first: int
    shape: tuple[int, ...]


class SplitRows:
    """As the files, by other names."""

    def __init__(self, files: Files, rows: Mapping[str, _Rows]) -> None:
        """`rows`: which they are, by their names here."""
        self.source = files.source
        self._files, self._rows = files, rows

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: rows.shape for name, rows in self._rows.items()}

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The type that a tensor is stored in; None if there is no such tensor."""
        return self._files.dtype_of(self._rows[name].name) if name in self._rows else None

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        stored, first, shape = self._rows[name]
        if dim == 0 or shape == self._files.shapes()[stored]:
            more = first if dim == 0 else 0
            yield from self._files.read(stored, dim, start + more, stop + more)
            return
        for piece in self._files.read(stored, 0, first, first + shape[0]):
            yield piece.narrow(dim, start, stop - start)


def nemotron_hybrid(files: Files, blocks: Sequence[Block]) -> SplitRows:
    """By the names of other families, of layers: each is of a block of files, or of two."""
    rows: dict[str, _Rows] = {}
    for name, shape in files.shapes().items():
        rows[_of_block(re.sub("^backbone\\.", "model.", name), blocks)] = _Rows(name, 0, shape)
    return SplitRows(files, rows)


def _of_block(name: str, blocks: Sequence[Block]) -> str:
    if (whole := _WHOLE.get(name)) is not None:
        return whole
    found = re.fullmatch(r"model\.layers\.(\d+)\.(norm|mixer)\.(.+)", name)
    if found is None or int(found[1]) >= len(blocks):
        return name
    layer, kind = blocks[int(found[1])]
    norm, block = _PARTS.get(kind, ("post_attention_layernorm", "mlp"))
    return f"model.layers.{layer}.{norm if found[2] == 'norm' else block}.{found[3]}"


def granite_hybrid(files: Files, *, has_experts: bool) -> SplitRows:
    """By the names of other families: what all tokens share is their one MLP, or beside experts the shared one."""
    shared = ".mlp.shared_experts." if has_experts else ".mlp."
    rows: dict[str, _Rows] = {}
    for name, shape in files.shapes().items():
        ours = name
        for pattern, known in _GRANITE:
            ours = re.sub(f"{pattern}$", known, ours)
        layer, _, last = name.rpartition(".shared_mlp.")
        if last == "input_linear.weight" and len(shape) == 2:
            size = shape[0] // 2
            for turn, part in enumerate(("gate", "up")):
                rows[f"{layer}{shared}{part}_proj.weight"] = _Rows(name, turn * size, (size, *shape[1:]))
            continue
        if last == "output_linear.weight":
            ours = f"{layer}{shared}down_proj.weight"
        rows[ours] = _Rows(name, 0, shape)
    return SplitRows(files, rows)
