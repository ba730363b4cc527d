"""Which tensors of a checkpoint of Gemma 3 fill which places of a vision encoder: SigLIP's tower, and what makes rows
for the language model of its patches.
"""

from tercet.model.vision_places import VisionPlaces
from tercet.model.vision_weights import Pooler, VisionLayer, VisionWeights

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."


def siglip_weights(places: VisionPlaces) -> VisionWeights:
    """In these places, not filled yet."""
    config = places.config
    hidden, embeddings = config.hidden_size, f"{_TOWER}embeddings."
    shape = hidden, 3, config.patch, config.patch
    return VisionWeights(
        patches=places.patches(f"{embeddings}patch_embedding", shape, bias=True),
        positions_GD=places.matrix(f"{embeddings}position_embedding.weight", config.positions**2, hidden),
        first_norm=None,
        layers=tuple(_layer(places, f"{_TOWER}encoder.layers.{index}.") for index in range(config.num_layers)),
        merger=Pooler(
            norm=places.norm(f"{_TOWER}post_layernorm", hidden, config.eps),
            norm_of_mean=places.rms_norm(f"{_PROJECTOR}mm_soft_emb_norm", hidden, config.out_eps, shift=1.0),
            out=places.turned(f"{_PROJECTOR}mm_input_projection_weight", config.out_size, hidden),
        ),
        deep=(),
    )


def _layer(places: VisionPlaces, prefix: str) -> VisionLayer:
    config = places.config
    hidden, attention = config.hidden_size, f"{prefix}self_attn."
    return VisionLayer(
        norm1=places.norm(f"{prefix}layer_norm1", hidden, config.eps),
        qkv=places.stacked([f"{attention}{name}_proj" for name in "qkv"], hidden, hidden, bias=True),
        o=places.linear(f"{attention}out_proj", hidden, hidden),
        norm2=places.norm(f"{prefix}layer_norm2", hidden, config.eps),
        up=places.up([f"{prefix}mlp.fc1"], bias=True),
        down=places.down(f"{prefix}mlp.fc2", bias=True),
    )
