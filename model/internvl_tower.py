"""Which tensors of a checkpoint of InternVL fill which places of a vision encoder: InternViT's tower, and what makes
rows for the language model of its patches.
"""

from tercet.model.vision_places import VisionPlaces
from tercet.model.vision_weights import Merger, VisionLayer, VisionWeights

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."


def internvl_weights(places: VisionPlaces) -> VisionWeights:
    """In these places, not filled yet."""
    config = places.config
    hidden, out, embeddings = config.hidden_size, config.out_size, f"{_TOWER}embeddings."
    joined = hidden * config.merge**2
    return VisionWeights(
        patches=places.patches(
            f"{embeddings}patch_embeddings.projection", (hidden, 3, config.patch, config.patch), bias=True
        ),
        positions_GD=places.only(f"{embeddings}position_embeddings", config.positions**2 + 1, hidden),
        first_norm=None,
        layers=tuple(_layer(places, f"{_TOWER}encoder.layer.{index}.") for index in range(config.num_layers)),
        merger=Merger(
            norm=places.layer_norm(f"{_PROJECTOR}layer_norm", joined, config.out_eps),
            join=None,
            first=places.linear(f"{_PROJECTOR}linear_1", out, joined),
            second=places.linear(f"{_PROJECTOR}linear_2", out, out),
        ),
        deep=(),
        first_D=places.only(f"{embeddings}cls_token", 1, hidden)[0],
        last_norm=places.layer_norm(f"{_TOWER}layernorm", hidden, config.eps) if config.last_norm else None,
    )


def _layer(places: VisionPlaces, prefix: str) -> VisionLayer:
    config = places.config
    hidden, attention = config.hidden_size, f"{prefix}attention."
    normed = [f"{attention}{name}_norm" for name in "qk"]
    return VisionLayer(
        norm1=places.norm(f"{prefix}layernorm_before", hidden, config.eps),
        qkv=places.stacked([f"{attention}{name}_proj" for name in "qkv"], hidden, hidden, bias=config.qkv_bias),
        o=places.linear(f"{attention}projection_layer", hidden, hidden),
        norm2=places.norm(f"{prefix}layernorm_after", hidden, config.eps),
        up=places.up([f"{prefix}mlp.fc1"], bias=True),
        down=places.down(f"{prefix}mlp.fc2", bias=True),
        qk_norm_J=places.vectors([f"{name}.weight" for name in normed], hidden) if config.qk_norms else None,
        scales=(places.scale(f"{prefix}lambda_1", hidden), places.scale(f"{prefix}lambda_2", hidden)),
    )
