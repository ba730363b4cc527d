"""Which tensors of a checkpoint of GLM-4.1V and its kin fill which places of a vision encoder."""

from tercet.model.vision_places import VisionPlaces
from tercet.model.vision_weights import GatedMerger, VisionLayer, VisionWeights

_TOWER = "visual."


def glm_weights(places: VisionPlaces) -> VisionWeights:
    """In these places, not filled yet."""
    config = places.config
    hidden, shape = config.hidden_size, (config.hidden_size, 3, config.frames, config.patch, config.patch)
    return VisionWeights(
        patches=places.patches(f"{_TOWER}patch_embed.proj", shape, bias=config.patch_bias),
        positions_GD=places.matrix(f"{_TOWER}embeddings.position_embedding.weight", config.positions**2, hidden),
        first_norm=places.norm(f"{_TOWER}post_conv_layernorm", hidden, config.eps),
        layers=tuple(_layer(places, f"{_TOWER}blocks.{index}.") for index in range(config.num_layers)),
        merger=_merger(places, f"{_TOWER}merger."),
        deep=(),
    )


def _layer(places: VisionPlaces, prefix: str) -> VisionLayer:
    config = places.config
    hidden, mlp = config.hidden_size, f"{prefix}mlp."
    return VisionLayer(
        norm1=places.norm(f"{prefix}norm1", hidden, config.eps),
        qkv=places.linear(f"{prefix}attn.qkv", 3 * hidden, hidden, bias=config.qkv_bias),
        o=places.linear(f"{prefix}attn.proj", hidden, hidden, bias=False),
        norm2=places.norm(f"{prefix}norm2", hidden, config.eps),
        up=places.up([f"{mlp}gate_proj", f"{mlp}up_proj"], bias=False),
        down=places.down(f"{mlp}down_proj", bias=False),
    )


def _merger(places: VisionPlaces, prefix: str) -> GatedMerger:
    config = places.config
    hidden, out, sizes = config.hidden_size, config.out_size, (config.out_inner_size, config.out_size)
    return GatedMerger(
        norm=places.norm(f"{_TOWER}post_layernorm", hidden, config.eps),
        join=places.convolved(f"{_TOWER}downsample", out, hidden),
        first=places.linear(f"{prefix}proj", out, out, bias=config.out_bias),
        first_norm=places.layer_norm(f"{prefix}post_projection_norm", out, config.out_eps),
        up=places.up([f"{prefix}gate_proj", f"{prefix}up_proj"], bias=config.out_bias, sizes=sizes),
        down=places.down(f"{prefix}down_proj", bias=config.out_bias, sizes=sizes),
    )
