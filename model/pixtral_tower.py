"""Which tensors of a checkpoint of Mistral 3 fill which places of a vision encoder: Pixtral's tower, and what makes
rows for the language model of its patches.
"""

from tercet.model.vision_places import VisionPlaces
from tercet.model.vision_weights import Merger, VisionLayer, VisionWeights

_PROJECTOR = "multi_modal_projector."


def pixtral_weights(places: VisionPlaces) -> VisionWeights:
    """In these places, not filled yet."""
    config = places.config
    hidden, out, bias = config.hidden_size, config.out_size, config.out_bias
    return VisionWeights(
        patches=places.patches("vision_tower.patch_conv", (hidden, 3, config.patch, config.patch), bias=False),
        positions_GD=None,
        first_norm=places.norm("vision_tower.ln_pre", hidden, config.eps),
        layers=tuple(_layer(places, f"vision_tower.transformer.layers.{index}.") for index in range(config.num_layers)),
        merger=Merger(
            norm=places.norm(f"{_PROJECTOR}norm", hidden, config.out_eps),
            join=places.channels_first(f"{_PROJECTOR}patch_merger.merging_layer", hidden, hidden),
            first=places.linear(f"{_PROJECTOR}linear_1", out, hidden, bias=bias),
            second=places.linear(f"{_PROJECTOR}linear_2", out, out, bias=bias),
        ),
        deep=(),
    )


def _layer(places: VisionPlaces, prefix: str) -> VisionLayer:
    config = places.config
    hidden, attention, mlp = config.hidden_size, f"{prefix}attention.", f"{prefix}feed_forward."
    return VisionLayer(
        norm1=places.norm(f"{prefix}attention_norm", hidden, config.eps),
        qkv=places.stacked([f"{attention}{name}_proj" for name in "qkv"], hidden, hidden, bias=False),
        o=places.linear(f"{attention}o_proj", hidden, hidden, bias=False),
        norm2=places.norm(f"{prefix}ffn_norm", hidden, config.eps),
        up=places.up([f"{mlp}gate_proj", f"{mlp}up_proj"], bias=False),
        down=places.down(f"{mlp}down_proj", bias=False),
    )
