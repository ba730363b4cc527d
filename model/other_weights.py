"""Other weights in the places of those that a rank has: addresses stay, so graphs do, and whoever knows a tensor.

Numbers are read straight into the tensors there are, as a start reads them into empty ones: on a GPU nothing is there
twice. What a start makes of weights once they are read (another order on the CPU, scales of tiles, a rounded head) is
made anew by the same functions, and copied to where it was. Knows no tensor by its name: two structures lie side by
side.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.rank_weights import EagleWeights, Weights
from tercet.model.scaled_rows import Kept
from tercet.model.shard import ShardBuilder
from tercet.model.weights import Checkpoint, carry_out, check_tensors
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight

_META = torch.device("meta")
T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """Whose weights they are, and how they are kept there: as `load_weights` is told."""

    rank: int
    size: int
    dtype: torch.dtype
    device: torch.device
    kept: Kept


def exchange_weights(
    there: Weights, checkpoint: Checkpoint, config: ModelConfig, rank: Rank, finish: Callable[[Weights], Weights]
) -> None:
    """Make `there` what a start would have made of the checkpoint: `finish` is what it does once all is read. A layer
    that guesses from another checkpoint stays.

    No step may run meanwhile. ValueError: its tensors do not fit; some are kept otherwise than those there are; or
    something is wrong with the files, and by then `there` may be neither the one nor the other.
    """
    if isinstance(there.guesser, EagleWeights):
        there = replace(there, guesser=None)
    tied = check_tensors(checkpoint, config)
    builder = ShardBuilder(config, rank.rank, rank.size, rank.dtype, _META, rank.kept)
    meant = builder.weights(there.interleaved, tied)
    places = _Places(checkpoint.source, rank.device)
    filled = places.of(meant, there)
    moves = [replace(move, into=places.view(move.into)) for move in builder.moves]
    _settle(rank.device)  # steps that are launched still read what there is
    carry_out(moves, checkpoint)
    if there.lm_head_VD is there.embedding_VD and not tied:  # there is no place for both
        if not torch.equal(filled.embedding_VD, filled.lm_head_VD):
            raise ValueError(f"{checkpoint.source}: its lm_head is not its embedding, as that of the weights there is")
        filled = replace(filled, lm_head_VD=filled.embedding_VD)
    for made, old in _pairs(finish(filled), there, checkpoint.source):
        old.copy_(made)
    _settle(rank.device)
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # what reading took is more than the engine has planned for


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Places:
    """Where tensors of a structure on the meta device go: to those in the same places of another, each once."""

    def __init__(self, source: str, device: torch.device) -> None:
        self._source, self._device = source, device
        self._bases: dict[int, Tensor] = {}
        """By the storage of what is meant, a tensor of the one that it has."""
        self._taken: set[int] = set()
        self._seen: dict[int, Tensor] = {}
        """By what is meant: what was the same tensor stays so."""

    def of(self, meant: T, there: object) -> T:
        """The structure with its tensors in their places. Where those that are there have been put into another order,
        they are new ones, which `finish` puts into that order."""
        if isinstance(meant, Tensor):
            return self._tensor(meant, there)  # type: ignore[return-value]
        if meant is None:  # what is there then was made of others
            return meant
        if isinstance(meant, tuple):
            return tuple(map(self.of, meant, _alike(meant, there, self._source)))  # type: ignore[return-value]
        if is_dataclass(meant) and not isinstance(meant, type):
            names = [field.name for field in fields(meant)]
            _alike(meant, there, self._source)
            return replace(meant, **{name: self.of(getattr(meant, name), getattr(there, name)) for name in names})
        if meant != there:
            raise _otherwise(self._source)
        return meant

    def view(self, into: Weight) -> Weight:
        """The same part of what is meant, in its place."""
        if isinstance(into, ScaledWeight):
            return replace(into, numbers_NJ=self._cut(into.numbers_NJ), scales_GN=self._cut(into.scales_GN))
        return self._cut(into)

    def _tensor(self, meant: Tensor, there: object) -> Tensor:
        if id(meant) not in self._seen:
            storage = _storage(meant)
            if storage not in self._bases:
                self._bases[storage] = self._base(meant, there)
            self._seen[id(meant)] = self._cut(meant)
        return self._seen[id(meant)]

    def _base(self, meant: Tensor, there: object) -> Tensor:
        if isinstance(there, ScaledWeight):
            raise _otherwise(self._source)
        if isinstance(there, Tensor) and not there.is_mkldnn:
            if not _lie_alike(meant, there):
                raise _otherwise(self._source)
            if _storage(there) not in self._taken:
                self._taken.add(_storage(there))
                return there
        count = meant.untyped_storage().nbytes() // meant.itemsize
        return torch.zeros(count, dtype=meant.dtype, device=self._device if meant.is_meta else meant.device)

    def _cut(self, meant: Tensor) -> Tensor:
        return self._bases[_storage(meant)].as_strided(meant.shape, meant.stride(), meant.storage_offset())


def _pairs(made: object, there: object, source: str) -> Iterator[tuple[Tensor, Tensor]]:
    """What is to be copied where."""
    if isinstance(made, Tensor):
        if not isinstance(there, Tensor) or not _look_alike(made, there):
            raise _otherwise(source)
        if made.is_mkldnn or made.data_ptr() != there.data_ptr():
            yield made, there
    elif isinstance(made, tuple):
        for one, other in zip(made, _alike(made, there, source), strict=True):
            yield from _pairs(one, other, source)
    elif is_dataclass(made):
        _alike(made, there, source)
        for field in fields(made):
            yield from _pairs(getattr(made, field.name), getattr(there, field.name), source)
    elif made != there:
        raise _otherwise(source)


def _alike(one: T, other: object, source: str) -> T:
    """The other, if it is of the same kind and size."""
    if not isinstance(other, type(one)):
        raise _otherwise(source)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) != len(other):
        raise _otherwise(source)
    return other


def _look_alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.is_mkldnn) == (other.dtype, other.shape, other.is_mkldnn)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """In storages of the same size, too."""

    def layout(tensor: Tensor) -> tuple[object, ...]:
        return tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()

    return _look_alike(one, other) and layout(one) == layout(other)


def _storage(tensor: Tensor) -> int:
    """Which it is, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def _otherwise(source: str) -> ValueError:
    return ValueError(f"{source}: some of its weights are kept otherwise than those there are")
