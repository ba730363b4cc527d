"""The places of a layer that carries a state, and which slice of which checkpoint tensor fills each.

A rank has some key heads, and the value heads that share them. Knows tensors' names; reads nothing.

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Iterator

import torch

from tercet.model.blocks import Delta
from tercet.model.config import ModelConfig
from tercet.model.places import Places
from tercet.model.rank_weights import DeltaWeights
from tercet.triton_kernels.scaled_weight import Weight

Rows = tuple[str, int, int, int]
"""Name of a tensor, how many rows it has, the first that is meant, and how many."""


def delta_product(places: Places, config: ModelConfig, prefix: str) -> Weight:
    """What reads the stream: rows for queries, keys, values, and the gates of what comes out; and, where these are not
    kept as stored, those for rates. `prefix`: of the names of the layer's attention."""
    delta = _delta(config)
    rows = [*_heads(delta, places), *([] if _apart(places, delta, prefix) else _rates(delta, places))]
    return _stacked(places, prefix, rows, config.hidden_size)


def delta_weights(places: Places, config: ModelConfig, prefix: str) -> DeltaWeights:
    """What comes behind it. `prefix`: of the names of the layer's attention."""
    delta = _delta(config)
    own = delta.of_rank(places.size)
    apart = _apart(places, delta, prefix)
    conv_C1W = places.empty(own.channels, 1, delta.taps)
    first = 0
    for _, _, start, count in _convolved(delta, places):
        places.rows(f"{prefix}conv1d.weight", delta.channels, start, conv_C1W[first : first + count])
        first += count
    heads = torch.empty(2, own.value_heads, dtype=torch.float32, device=places.device)
    for name, into in zip(("A_log", "dt_bias"), heads, strict=True):
        places.rows(f"{prefix}{name}", delta.value_heads, places.rank * own.value_heads, into)
    norm_V = torch.empty(delta.value_dim, dtype=torch.float32, device=places.device)
    places.rows(f"{prefix}norm.weight", delta.value_dim, 0, norm_V)
    return DeltaWeights(
        rates_RD=_stacked(places, prefix, list(_rates(delta, places)), config.hidden_size) if apart else None,
        conv_CW=conv_C1W[:, 0],
        a_log_H=heads[0],
        dt_bias_H=heads[1],
        norm_V=norm_V,
    )


def _delta(config: ModelConfig) -> Delta:
    assert config.delta is not None
    return config.delta


def _apart(places: Places, delta: Delta, prefix: str) -> bool:
    """Rates have so few rows that files have them plain where all else is quantized."""
    name, *_ = next(_heads(delta, places))
    return places.is_kept(f"{prefix}{name}.weight")


def _stacked(places: Places, prefix: str, rows: list[Rows], hidden: int) -> Weight:
    names = dict.fromkeys(f"{prefix}{name}.weight" for name, *_ in rows)
    into = places.matrix(names, sum(count for *_, count in rows), hidden, hidden)
    place = 0
    for name, whole, start, count in rows:
        places.rows(f"{prefix}{name}.weight", whole, start, into[place : place + count])
        place += count
    return into


def _convolved(delta: Delta, places: Places) -> Iterator[Rows]:
    """Queries, keys, values: where all heads' are in one, each kind by itself."""
    own = delta.of_rank(places.size)
    keys, values = own.key_heads * delta.key_dim, own.value_heads * delta.value_dim
    whole = delta.key_heads * delta.key_dim
    for start, count in ((0, keys), (whole, keys), (2 * whole, values)):
        yield "in_proj_qkv", delta.channels, start + places.rank * count, count


def _heads(delta: Delta, places: Places) -> Iterator[Rows]:
    own = delta.of_rank(places.size)
    values = own.value_heads * delta.value_dim
    if delta.by_key_heads:
        each = delta.value_heads // delta.key_heads * delta.value_dim
        yield from _kinds("in_proj_qkvz", delta, places, (delta.key_dim, delta.key_dim, each, each))
    else:
        yield from _convolved(delta, places)
        yield "in_proj_z", places.size * values, places.rank * values, values


def _rates(delta: Delta, places: Places) -> Iterator[Rows]:
    own = delta.of_rank(places.size)
    if delta.by_key_heads:
        each = delta.value_heads // delta.key_heads
        yield from _kinds("in_proj_ba", delta, places, (each, each))
    else:
        for name in ("in_proj_b", "in_proj_a"):
            yield name, delta.value_heads, places.rank * own.value_heads, own.value_heads


def _kinds(name: str, delta: Delta, places: Places, sizes: tuple[int, ...]) -> Iterator[Rows]:
    """Of a tensor that has all kinds of a key head's rows, then of the next: each kind of this rank's heads."""
    block, own = sum(sizes), delta.key_heads // places.size
    for kind, size in enumerate(sizes):
        for head in range(places.rank * own, (places.rank + 1) * own):
            yield name, delta.key_heads * block, head * block + sum(sizes[:kind]), size
