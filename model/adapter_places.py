"""Places for adapters that come and go while steps run: each is as large as the largest that may come, and stays where
it is, so that kernels and graphs find whatever is in it.

Reading a file takes its time, and may be done in another thread than the steps; what was read is put into its place
between them. Nobody asks for what is in a place before it is full, nor while it is filled anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tercet.model.adapter_file import MOST_RANK, AdapterFile
from tercet.model.adapters import LayerAdapters, Ranks, adapters_for_cpu, load_adapters, module_sizes, ranks_of
from tercet.model.config import ModelConfig
from tercet.model.linear import Pairs, ReorderedPairs


@dataclass(frozen=True)
class Reserved:
    """How many places, and of which rank every module of them is."""

    num_places: int
    rank: int


def reserved_ranks(reserved: Reserved, config: ModelConfig) -> Ranks:
    """What kernels depend on, whatever comes."""
    assert 0 < reserved.rank <= MOST_RANK
    ranks_of((), config)  # of a model that takes any
    modules = {name for layer in range(config.num_layers) for name in module_sizes(config, layer)}
    return Ranks(reserved.num_places, dict.fromkeys(sorted(modules), reserved.rank))


def check_fits(adapter: AdapterFile, ranks: Ranks, config: ModelConfig) -> None:
    """ValueError names what does not fit the model, or no place that is for it."""
    for name, rank in ranks_of((adapter,), config).of_modules.items():
        if rank > (most := ranks.of_modules[name]):
            raise ValueError(
                f"{adapter.tensors.source}: the rank of {name} is {rank}; want {most} at most (--max-adapter-rank)"
            )


@dataclass(frozen=True)
class AdapterPlaces:
    """Those of one rank's layers."""

    layers: Sequence[LayerAdapters]
    ranks: Ranks
    config: ModelConfig
    rank: int
    """The process's, of `size`."""
    size: int
    dtype: torch.dtype
    on_gpu: bool

    def read(self, folder: Path) -> tuple[LayerAdapters, ...]:
        """One adapter, as a place has it, in the host's memory. ValueError as `check_fits` and `AdapterFile` say."""
        adapter = AdapterFile(folder)
        check_fits(adapter, self.ranks, self.config)
        alone = load_adapters(
            (adapter,), Ranks(1, self.ranks.of_modules), self.config, rank=self.rank, size=self.size, dtype=self.dtype,
            device=torch.device("cpu"), interleaved=self.on_gpu,
        )  # fmt: skip
        return alone if self.on_gpu else adapters_for_cpu(alone)

    def put(self, place: int, adapter: Sequence[LayerAdapters]) -> Iterator[None]:
        """What `read` gave, a layer at a time, between steps."""
        for whole, one in zip(self.layers, adapter, strict=True):
            for name in ("qkv", "o", "gate_up", "down"):
                _put(getattr(whole, name), place, getattr(one, name))
            yield


def _put(places: Pairs | None, place: int, pairs: Pairs | None) -> None:
    if places is None or pairs is None:
        assert places is pairs
    elif isinstance(places, ReorderedPairs):
        assert isinstance(pairs, ReorderedPairs)
        places.downs[place], places.ups[place] = pairs.downs[0], pairs.ups[0]
    else:
        assert not isinstance(pairs, ReorderedPairs)
        places.down_ARK[place].copy_(pairs.down_ARK[0])
        places.up_ANQ[place].copy_(pairs.up_ANQ[0])
