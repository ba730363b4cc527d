"""Which tensors of a checkpoint of Gemma 4 fill which places of a vision encoder."""

from collections.abc import Sequence

from tercet.model.vision_places import VisionPlaces
from tercet.model.vision_weights import ClippedLinear, Linear, MeanPooler, VisionLayer, VisionWeights

_TOWER = "vision_tower."


def gemma4_weights(places: VisionPlaces) -> VisionWeights:
    """In these places, not filled yet."""
    config = places.config
    hidden, embedder = config.hidden_size, f"{_TOWER}patch_embedder."
    standard = None
    if config.standardized:
        standard = places.scale(f"{_TOWER}std_bias", hidden), places.scale(f"{_TOWER}std_scale", hidden)
    return VisionWeights(
        patches=places.channels_last(f"{embedder}input_proj"),
        positions_GD=places.by_axes(f"{embedder}position_embedding_table"),
        first_norm=None,
        layers=tuple(_layer(places, f"{_TOWER}encoder.layers.{index}.") for index in range(config.num_layers)),
        merger=MeanPooler(
            standard=standard,
            norm_of_mean=places.plain_norm(hidden, config.out_eps),
            out=places.linear("embed_vision.embedding_projection", config.out_size, hidden, bias=False),
        ),
        deep=(),
    )


def _layer(places: VisionPlaces, prefix: str) -> VisionLayer:
    config = places.config
    hidden, eps, attention, mlp = config.hidden_size, config.eps, f"{prefix}self_attn.", f"{prefix}mlp."
    qkv, o, up, down = (
        [f"{attention}{name}_proj" for name in "qkv"],
        [f"{attention}o_proj"],
        [f"{mlp}gate_proj", f"{mlp}up_proj"],
        [f"{mlp}down_proj"],
    )
    return VisionLayer(
        norm1=places.norm(f"{prefix}input_layernorm", hidden, eps),
        qkv=_clipped(places, qkv, _qkv(places, qkv)),
        o=_clipped(places, o, places.linear(f"{o[0]}.linear", hidden, hidden, bias=False)),
        norm2=places.norm(f"{prefix}pre_feedforward_layernorm", hidden, eps),
        up=_clipped(places, up, places.up([f"{name}.linear" for name in up], bias=False)),
        down=_clipped(places, down, places.down(f"{down[0]}.linear", bias=False)),
        head_norm_3D=places.head_norms([f"{attention}q_norm.weight", f"{attention}k_norm.weight"]),
        norms_behind=(
            places.norm(f"{prefix}post_attention_layernorm", hidden, eps),
            places.norm(f"{prefix}post_feedforward_layernorm", hidden, eps),
        ),
    )


def _qkv(places: VisionPlaces, names: Sequence[str]) -> Linear:
    """Of which queries and keys turn."""
    hidden = places.config.hidden_size
    product = places.empty_linear(3 * hidden, hidden)
    for name, fill, into in zip(
        names, (places.turning, places.turning, places.fill), product.weight_NK.chunk(3), strict=True
    ):
        fill(f"{name}.linear.weight", into)
    return product


def _clipped(places: VisionPlaces, names: Sequence[str], product: Linear) -> Linear | ClippedLinear:
    """One of as many parts as there are names, each with bounds of its own, if there are any."""
    if not places.config.clipped:
        return product
    return ClippedLinear(product.weight_NK.chunk(len(names)), places.bounds(names))
