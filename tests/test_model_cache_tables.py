"""Which layers share page tables, and which take turns with memory."""

from dataclasses import replace

import pytest

from checkpoints import checkpoint
from tercet.model.cache_tables import cache_tables, of_few_layers, one_table
from tercet.model.checkpoint import read_config
from tercet.model.config import ModelConfig


def config_of(windows: list[int]) -> ModelConfig:
    """Of a layer for each."""
    base = read_config(checkpoint("mistral"))
    return replace(base, num_layers=len(windows), layer_windows=tuple(windows), layer_heads=(), layer_ropes=())


@pytest.mark.parametrize(
    ("windows", "tables", "num_places"),
    [
        ([128, 0] * 12, (0, 128), 12),  # gpt-oss-20b
        (([1024] * 5 + [0]) * 5 + [1024] * 4, (0, *[1024] * 6), 5),  # Gemma 3 4B
        (([1024] * 5 + [0]) * 10 + [1024] * 2, (0, *[1024] * 6), 10),  # and 27B, two of whose tables have fewer layers
        ([0] + [64] * 31, (0, *[64] * 7), 5),  # not a table for each layer
        ([0, 4, 9, 9], (0, 4, 9, 9), 1),
        ([64] * 32, (64,), 32),
    ],
)
def test_as_many_layers_as_are_fewest_share_a_table(
    windows: list[int], tables: tuple[int, ...], num_places: int
) -> None:
    made = cache_tables(config_of(windows), 2000)
    assert made.windows == tables
    assert made.num_places == num_places
    assert [made.windows[table] for table in made.of_layers] == windows
    assert len(set(zip(made.of_layers, made.places, strict=True))) == len(windows), "two layers write to one place"


def test_windows_that_nobody_outgrows_are_none() -> None:
    config = config_of([1024, 0, 4096, 0])
    assert cache_tables(config, 1024) == one_table(config)
    some = cache_tables(config, 4096)
    assert (some.windows, some.of_layers, some.places) == ((0, 0, 0, 1024), (3, 0, 1, 2), (0, 0, 0, 0))


def test_a_window_of_few_layers_saves_nothing() -> None:
    config = config_of([64] + [0] * 31)
    assert cache_tables(config, 2000) == one_table(config)


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3.5", "deepseek-v3"])
def test_models_with_one_table(family: str) -> None:
    """They have no windows, layers that hold different numbers, states or latents."""
    config = read_config(checkpoint(family))
    tables = cache_tables(config, 512)
    assert tables == one_table(config)
    assert tables.windows == (0,)


def test_few_layers_find_a_table_of_their_kind() -> None:
    tables = cache_tables(config_of(([1024] * 5 + [0]) * 10), 8192)
    few = of_few_layers(tables, config_of([1024, 0, 0]))
    assert few.windows == tables.windows
    assert [few.windows[table] for table in few.of_layers] == [1024, 0, 0]
