"""Which tensors of a checkpoint of Qwen's families fill which places of a vision encoder."""

from tercet.model.vision_places import VisionPlaces
from tercet.model.vision_weights import Merger, VisionLayer, VisionWeights


def qwen_weights(places: VisionPlaces) -> VisionWeights:
    """In these places, not filled yet."""
    config = places.config
    hidden, early = config.hidden_size, config.names == "qwen2"
    shape = hidden, 3, config.frames, config.patch, config.patch
    num_positions = config.positions**2
    return VisionWeights(
        patches=places.patches("visual.patch_embed.proj", shape, bias=config.patch_bias),
        positions_GD=places.matrix("visual.pos_embed.weight", num_positions, hidden) if num_positions else None,
        first_norm=None,
        layers=tuple(_layer(places, f"visual.blocks.{index}.") for index in range(config.num_layers)),
        merger=_merger(places, "visual.merger.", "ln_q" if early else "norm", hidden),
        deep=tuple(
            _merger(places, f"visual.deepstack_merger_list.{index}.", "norm", hidden * config.merge**2)
            for index in range(len(config.deep_layers))
        ),
    )


def _layer(places: VisionPlaces, prefix: str) -> VisionLayer:
    config = places.config
    hidden = config.hidden_size
    if config.gated:
        ups, down = ["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj"
    elif config.names == "qwen2":
        ups, down = ["mlp.fc1"], "mlp.fc2"
    else:
        ups, down = ["mlp.linear_fc1"], "mlp.linear_fc2"
    return VisionLayer(
        norm1=places.norm(f"{prefix}norm1", hidden, config.eps),
        qkv=places.linear(f"{prefix}attn.qkv", 3 * hidden, hidden),
        o=places.linear(f"{prefix}attn.proj", hidden, hidden),
        norm2=places.norm(f"{prefix}norm2", hidden, config.eps),
        up=places.up([f"{prefix}{name}" for name in ups], bias=True),
        down=places.down(f"{prefix}{down}", bias=True),
    )


def _merger(places: VisionPlaces, prefix: str, norm: str, normed: int) -> Merger:
    config = places.config
    first, second = ("mlp.0", "mlp.2") if config.names == "qwen2" else ("linear_fc1", "linear_fc2")
    joined = config.hidden_size * config.merge**2
    return Merger(
        norm=places.norm(f"{prefix}{norm}", normed, config.out_eps),
        join=None,
        first=places.linear(f"{prefix}{first}", joined, joined),
        second=places.linear(f"{prefix}{second}", config.out_size, joined),
    )
