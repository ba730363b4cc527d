"""The places of a Mamba-2 layer, and which slice of which checkpoint tensor fills each.

A rank has some heads, and their groups' queries and keys. Knows tensors' names; reads nothing.

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Iterator

import torch

from tercet.model.blocks import Mamba
from tercet.model.places import Places
from tercet.model.rank_weights import MambaWeights
from tercet.triton_kernels.scaled_weight import Weight


def mamba_product(places: Places, mamba: Mamba, prefix: str, hidden: int) -> Weight:
    """What reads the stream: rows for queries, keys, values, for the gates of what comes out, and for time steps.
    `prefix`: of the names of the layer's Mamba."""
    own, name = mamba.of_rank(places.size), f"{prefix}in_proj.weight"
    values, of_rank = mamba.value_heads * mamba.value_dim, own.value_heads * own.value_dim
    whole = values + mamba.channels + mamba.value_heads
    rows = [(name, whole, values + start, count) for start, count in _convolved(places, mamba)]
    rows.append((name, whole, places.rank * of_rank, of_rank))
    rows.append((name, whole, values + mamba.channels + places.rank * own.value_heads, own.value_heads))
    return places.stacked(rows, hidden)


def mamba_weights(places: Places, mamba: Mamba, prefix: str) -> MambaWeights:
    """What comes behind it. `prefix`: of the names of the layer's Mamba."""
    own = mamba.of_rank(places.size)
    conv_C1W, conv_bias_C = places.empty(own.channels, 1, mamba.taps), places.empty(own.channels).zero_()
    first = 0
    for start, count in _convolved(places, mamba):
        into = slice(first, first + count)
        places.rows(f"{prefix}conv1d.weight", mamba.channels, start, conv_C1W[into])
        if mamba.conv_bias:
            places.rows(f"{prefix}conv1d.bias", mamba.channels, start, conv_bias_C[into])
        first += count
    heads = torch.empty(3, own.value_heads, dtype=torch.float32, device=places.device)
    for name, into_H in zip(("A_log", "dt_bias", "D"), heads, strict=True):
        places.rows(f"{prefix}{name}", mamba.value_heads, places.rank * own.value_heads, into_H)
    num_values = own.value_heads * own.value_dim
    norm_X = torch.empty(num_values, dtype=torch.float32, device=places.device)
    places.rows(f"{prefix}norm.weight", places.size * num_values, places.rank * num_values, norm_X)
    return MambaWeights(
        conv_CW=conv_C1W[:, 0], conv_bias_C=conv_bias_C, a_log_H=heads[0], dt_bias_H=heads[1], skip_H=heads[2],
        norm_X=norm_X,
    )  # fmt: skip


def _convolved(places: Places, mamba: Mamba) -> Iterator[tuple[int, int]]:
    """This rank's queries, keys and values among the channels, where values come first and queries last."""
    own = mamba.of_rank(places.size)
    values, of_rank = mamba.value_heads * mamba.value_dim, own.value_heads * own.value_dim
    keys, first = own.key_heads * own.key_dim, places.rank * mamba.key_heads // places.size * mamba.key_dim
    yield values + mamba.key_heads * mamba.key_dim + first, keys
    yield values + first, keys
    yield places.rank * of_rank, of_rank
