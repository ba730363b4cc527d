"""What a config.json says of Nemotron-H's blocks, each of which is one thing: Mamba-2, attention, an MLP or experts.

Here a layer is Mamba or attention and the MLP or experts right behind it, if there are any. Knows no other field.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tercet.model.config_fields import number

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OTHERS = {"linear_attention": "mamba", "full_attention": "attention"}
_MIXERS = ("mamba", "attention")


class Block(NamedTuple):
    """Of a file: which layer it is a part of, and what."""

    layer: int
    kind: str


def blocks(config: Mapping[str, Any]) -> list[Block]:
    """All of them; ValueError names what cannot be a layer."""
    given, name = config.get("layers_block_type"), "layers_block_type"
    if given is None:
        given, name = config.get("layer_types"), "layer_types"
    if given is None:
        given, name = config.get("hybrid_override_pattern", "ME*-"), "hybrid_override_pattern"
    kinds = [_KINDS.get(one, _OTHERS.get(one, one)) for one in given] if isinstance(given, list | str) else []
    if not kinds or any(kind not in _KINDS.values() for kind in kinds):
        raise ValueError(f"config.json: {name} is {given!r}; supported: {', '.join(_KINDS.values())} for each block")
    found: list[Block] = []
    for index, kind in enumerate(kinds):
        behind = found[-1] if found else Block(-1, "nothing")
        if kind in _MIXERS:
            found.append(Block(behind.layer + 1, kind))
        elif behind.kind in _MIXERS:
            found.append(Block(behind.layer, kind))
        else:
            raise ValueError(
                f"config.json: {name} has {kind} as block {index}, behind {behind.kind}; supported: right behind mamba "
                f"or attention"
            )
    return found


def as_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the names of Granite's hybrids, of layers. The least time step is that which weights were begun
    with, as in transformers."""
    found = blocks(config)
    num_layers = found[-1].layer + 1
    seconds = {block.layer: block.kind for block in found if block.kind not in _MIXERS}
    names = {
        "mamba_num_heads": "n_heads",
        "mamba_head_dim": "d_head",
        "ssm_state_size": "d_state",
        "n_groups": "n_groups",
    }
    names |= {"conv_kernel": "d_conv", "use_conv_bias": "conv_bias"}
    return {
        **config,
        **{f"mamba_{ours}": config[theirs] for theirs, ours in names.items()},
        "num_hidden_layers": num_layers,
        "layer_types": [block.kind for block in found if block.kind in _MIXERS],
        "moe_layers": [layer for layer, kind in seconds.items() if kind == "moe"],
        "bare_layers": [layer for layer in range(num_layers) if layer not in seconds],
        "rms_norm_eps": config["layer_norm_epsilon"],
        "time_step_limit": [number(config, "time_step_min", 0.001), math.inf],
    }
