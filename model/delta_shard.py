"""The places of a layer that carries a state, and which slice of which checkpoint tensor fills each.

A rank has some key heads, and the value heads that share them. Knows tensors' names; reads nothing.

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Iterator

import torch

from tercet.model.blocks import Delta
from tercet.model.places import Places, Rows
from tercet.model.rank_weights import DeltaWeights
from tercet.triton_kernels.scaled_weight import Weight


def delta_product(places: Places, delta: Delta, prefix: str, hidden: int) -> Weight:
    """What reads the stream: rows for queries, keys, values, and the gates of what comes out; and, where these are not
    kept as stored, those for rates. `prefix`: of the names of the layer's attention."""
    rows = _heads(delta, places, prefix) if _apart(places, delta, prefix) else delta_rows(places, delta, prefix)
    return places.stacked([*rows], hidden)


def delta_rows(places: Places, delta: Delta, prefix: str) -> Iterator[Rows]:
    """All of them, in their order."""
    yield from _heads(delta, places, prefix)
    yield from _rates(delta, places, prefix)


def delta_weights(places: Places, delta: Delta, prefix: str, hidden: int) -> DeltaWeights:
    """What comes behind it. `prefix`: of the names of the layer's attention."""
    own = delta.of_rank(places.size)
    rates = [*_rates(delta, places, prefix)] if _apart(places, delta, prefix) else None
    conv_C1W = places.empty(own.channels, 1, delta.taps)
    first = 0
    for _, _, start, count in _convolved(delta, places, prefix):
        places.rows(f"{prefix}conv1d.weight", delta.channels, start, conv_C1W[first : first + count])
        first += count
    heads = torch.empty(2, own.value_heads, dtype=torch.float32, device=places.device)
    for name, into in zip(("A_log", "dt_bias"), heads, strict=True):
        places.rows(f"{prefix}{name}", delta.value_heads, places.rank * own.value_heads, into)
    norm_V = torch.empty(delta.value_dim, dtype=torch.float32, device=places.device)
    places.rows(f"{prefix}norm.weight", delta.value_dim, 0, norm_V)
    return DeltaWeights(
        rates_RD=None if rates is None else places.stacked(rates, hidden),
        conv_CW=conv_C1W[:, 0],
        a_log_H=heads[0],
        dt_bias_H=heads[1],
        norm_V=norm_V,
    )


def _apart(places: Places, delta: Delta, prefix: str) -> bool:
    """Rates have so few rows that files have them plain where all else is quantized."""
    name, *_ = next(_heads(delta, places, prefix))
    return places.is_kept(name)


def _convolved(delta: Delta, places: Places, prefix: str) -> Iterator[Rows]:
    """Queries, keys, values: where all heads' are in one, each kind by itself."""
    own = delta.of_rank(places.size)
    keys, values = own.key_heads * delta.key_dim, own.value_heads * delta.value_dim
    whole = delta.key_heads * delta.key_dim
    for start, count in ((0, keys), (whole, keys), (2 * whole, values)):
        yield f"{prefix}in_proj_qkv.weight", delta.channels, start + places.rank * count, count


def _heads(delta: Delta, places: Places, prefix: str) -> Iterator[Rows]:
    own = delta.of_rank(places.size)
    values = own.value_heads * delta.value_dim
    if delta.by_key_heads:
        each = delta.value_heads // delta.key_heads * delta.value_dim
        yield from _kinds(f"{prefix}in_proj_qkvz.weight", delta, places, (delta.key_dim, delta.key_dim, each, each))
    else:
        yield from _convolved(delta, places, prefix)
        yield f"{prefix}in_proj_z.weight", places.size * values, places.rank * values, values


def _rates(delta: Delta, places: Places, prefix: str) -> Iterator[Rows]:
    own = delta.of_rank(places.size)
    if delta.by_key_heads:
        each = delta.value_heads // delta.key_heads
        yield from _kinds(f"{prefix}in_proj_ba.weight", delta, places, (each, each))
    else:
        for name in ("in_proj_b", "in_proj_a"):
            yield f"{prefix}{name}.weight", delta.value_heads, places.rank * own.value_heads, own.value_heads


def _kinds(name: str, delta: Delta, places: Places, sizes: tuple[int, ...]) -> Iterator[Rows]:
    """Of a tensor that has all kinds of a key head's rows, then of the next: each kind of this rank's heads."""
    block, own = sum(sizes), delta.key_heads // places.size
    for kind, size in enumerate(sizes):
        for head in range(places.rank * own, (places.rank + 1) * own):
            yield name, delta.key_heads * block, head * block + sum(sizes[:kind]), size
