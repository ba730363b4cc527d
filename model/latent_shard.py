"""The places of a layer's attention to latents, and which slice of which checkpoint tensor fills each.

A rank has the queries and values of some heads, and makes all latents itself. Knows tensors' names; reads nothing.

Shape suffixes as in `rank_weights.py`.
"""

from tercet.model.config import ModelConfig
from tercet.model.places import Places
from tercet.model.rank_weights import LatentWeights
from tercet.triton_kernels.scaled_weight import Weight

OF_HEADS = "kv_b_proj.weight"
"""Whose rows are matrices of each head's own, which are plain whatever the checkpoint has."""
_LATENTS, _QUERIES_FIRST = "kv_a_proj_with_mqa.weight", "q_a_proj.weight"
OF_ALL_RANKS = _LATENTS, _QUERIES_FIRST
"""Which each rank has whole."""


def first_product(places: Places, config: ModelConfig, prefix: str) -> Weight:
    """What reads the stream: rows for queries, or for what they are made from, then those for latents and what turns.

    `prefix`: of the names of the layer's attention.
    """
    latent, hidden = config.latent, config.hidden_size
    assert latent is not None
    whole, first, count = (latent.q_rank, 0, latent.q_rank) if latent.q_rank else _queries(places, config)
    queries, latents = f"{prefix}{_first_name(latent.q_rank)}", f"{prefix}{_LATENTS}"
    return places.stacked([(queries, whole, first, count), (latents, latent.dim, 0, latent.dim)], hidden)


def latent_weights(places: Places, config: ModelConfig, prefix: str) -> LatentWeights:
    """What comes behind it. `prefix`: of the names of the layer's attention."""
    latent = config.latent
    assert latent is not None
    query_XQ = None
    if latent.q_rank:
        whole, first, count = _queries(places, config)
        name = f"{prefix}q_b_proj.weight"
        query_XQ = places.matrix([name], count, latent.q_rank, latent.q_rank)
        places.rows(name, whole, first, query_XQ)
    heads, each = config.num_heads // places.size, latent.still + latent.value
    up_HXL = places.empty(heads, each, latent.rank)
    rows = up_HXL.view(heads * each, latent.rank)
    places.rows(f"{prefix}{OF_HEADS}", config.num_heads * each, places.rank * len(rows), rows)
    return LatentWeights(
        query_norm_Q=places.norm(f"{prefix}q_a_layernorm", latent.q_rank) if latent.q_rank else None,
        query_XQ=query_XQ,
        latent_norm_L=places.norm(f"{prefix}kv_a_layernorm", latent.rank),
        up_HXL=up_HXL,
        num_still=latent.still,
    )


def _first_name(q_rank: int) -> str:
    return _QUERIES_FIRST if q_rank else "q_proj.weight"


def _queries(places: Places, config: ModelConfig) -> tuple[int, int, int]:
    """How many rows make queries in all, the first of this rank, and how many it has."""
    count = config.num_heads // places.size * config.head_dim
    return config.num_heads * config.head_dim, places.rank * count, count
