"""Which layers find their keys and values by the same page table, and which take turns with the same memory.

Layers that see as many tokens back share page tables. As a window goes on, what it leaves behind is given back, and may
be a page of layers with another window next: so those use the same memory, each for pages of its own. Knows layers;
which page belongs to whom is the scheduler's matter.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tercet.model.config import ModelConfig

_MOST_TABLES = 8
"""Each takes entries of its own for every page of a slot, and a launch where few rows are planned."""


@dataclass(frozen=True)
class CacheTables:
    """Of a model's layers that attend, and the one that guesses, in their order."""

    windows: tuple[int, ...]
    """Of each page table, how many tokens back its layers see at most; 0: all."""
    of_layers: tuple[int, ...]
    """Whose is which."""
    places: tuple[int, ...]
    """In which of the cache's parts each layer's keys and values are."""

    @property
    def num_places(self) -> int:
        return 1 + max(self.places)


def one_table(config: ModelConfig) -> CacheTables:
    """For all layers: each has its own part of the cache."""
    return CacheTables((0,), (0,) * len(config.cache_places), tuple(config.cache_places))


def cache_tables(config: ModelConfig, max_model_len: int) -> CacheTables:
    """Tables apart for windows that sequences outgrow, of a model whose layers all hold as much of a token."""
    if config.carried is not None or config.latent is not None or config.guesses or len(set(config.layer_heads)) > 1:
        return one_table(config)
    seen = [window if window < max_model_len else 0 for window in config.layer_windows]
    if not any(seen):
        return one_table(config)
    counts = Counter(sorted(seen))
    # As many layers to a table as there are of those that are fewest, so that no memory is without a layer there.
    size = min(counts.values())
    while sum(-(-count // size) for count in counts.values()) > _MOST_TABLES:
        size += 1
    if -(-counts[0] // size) * size >= len(seen):  # what sequences keep would take as much
        return one_table(config)
    windows, of_layers = _dealt_out(seen, counts, size)
    return CacheTables(windows, of_layers, _places(of_layers))


def _dealt_out(seen: list[int], counts: Counter[int], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    windows, left = list[int](), dict[int, Iterator[int]]()
    for window, count in counts.items():
        tables = range(len(windows), len(windows) + -(-count // size))
        windows += [window] * len(tables)
        left[window] = iter([table for table in tables for _ in range(size)])
    return tuple(windows), tuple(next(left[window]) for window in seen)


def _places(of_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Each layer's is the next that its table has not used."""
    used, places = Counter[int](), list[int]()
    for table in of_layers:
        places.append(used[table])
        used[table] += 1
    return tuple(places)


def of_few_layers(tables: CacheTables, config: ModelConfig) -> CacheTables:
    """The tables of a model, for the same with fewer layers, each of which has one that is like its own."""
    if len(tables.windows) == 1:
        return one_table(config)
    of_layers = tuple(
        tables.windows.index(window if window in tables.windows else 0) for window in config.layer_windows
    )
    return CacheTables(tables.windows, of_layers, tuple(range(len(of_layers))))
