"""What a config.json says of Mamba-2 layers, which carry a state too, and of the attention between them.

Knows the families that have them, and what transformers assumes of those; knows no other field.
"""

import math
from collections.abc import Mapping
from typing import Any

from tercet.model.blocks import Mamba
from tercet.model.config_fields import flag, positive

_MOST_TAPS = 8
_CARRIES = ("mamba", "linear_attention")
_ATTENDS = ("attention", "full_attention")
MAMBA_DEFAULTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    },
    "nemotron_h": {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
}
"""The families that may have such layers; of each, what transformers assumes where config.json is silent."""


def mamba(config: Mapping[str, Any], family: str) -> Mamba | None:
    """What some layers have in place of keys and values, if the family has that; None too where no layer has it."""
    if family not in MAMBA_DEFAULTS:
        return None
    layers = _layers(config)
    if not layers:
        return None
    heads, groups = positive(config, "mamba_n_heads"), positive(config, "mamba_n_groups")
    if heads % groups:
        raise ValueError(f"config.json: mamba_n_heads is {heads}; want a multiple of mamba_n_groups ({groups})")
    size = _head_size(config, heads) if family == "granitemoehybrid" else positive(config, "mamba_d_head")
    return _checked(
        Mamba(
            key_heads=groups,
            value_heads=heads,
            key_dim=positive(config, "mamba_d_state"),
            value_dim=size,
            taps=positive(config, "mamba_d_conv"),
            layers=layers,
            norm_size=heads * size // groups,
            conv_bias=flag(config, "mamba_conv_bias"),
            time_steps=_time_steps(config),
        )
    )


def turns(config: Mapping[str, Any], family: str) -> bool:
    """Whether positions turn heads where there is attention."""
    if family not in MAMBA_DEFAULTS:
        return True
    if family == "nemotron_h":
        return False
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ValueError(f"config.json: position_embedding_type is {kind!r}; supported: rope, nope")
    return bool(kind == "rope")


def _head_size(config: Mapping[str, Any], heads: int) -> int:
    inner = positive(config, "mamba_expand") * positive(config, "hidden_size")
    given = config["mamba_d_head"]
    size = inner // heads if given == "auto" else given
    if size != inner / heads:
        raise ValueError(
            f"config.json: mamba_d_head is {given!r}; want mamba_expand times hidden_size ({inner}) over mamba_n_heads "
            f"({heads})"
        )
    return int(size)


def _checked(mamba: Mamba) -> Mamba:
    """ValueError names what kernels do not know."""
    if not 16 <= mamba.key_dim <= 256 or mamba.key_dim & (mamba.key_dim - 1):
        raise ValueError(f"config.json: a Mamba state's size is {mamba.key_dim}; supported: 16, 32, 64, 128 and 256")
    if mamba.value_dim % 16 or not 16 <= mamba.value_dim <= 256:
        raise ValueError(f"config.json: a Mamba head's size is {mamba.value_dim}; want a multiple of 16, 256 at most")
    if not 2 <= mamba.taps <= _MOST_TAPS:
        raise ValueError(f"config.json: Mamba's convolution has {mamba.taps} taps; supported: 2 to {_MOST_TAPS}")
    return mamba


def _layers(config: Mapping[str, Any]) -> frozenset[int]:
    num_layers = positive(config, "num_hidden_layers")
    name = "layers_block_type" if config.get("layer_types") is None else "layer_types"
    types = config.get(name)
    known = (*_CARRIES, *_ATTENDS)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        wanted = f"{_CARRIES[0]} or {_ATTENDS[0]}"
        raise ValueError(f"config.json: {name} is {types!r}; want {wanted} for each of {num_layers} layers")
    if not any(kind in _ATTENDS for kind in types):
        raise ValueError(f"config.json: {name} has no {_ATTENDS[0]}; want one at least")
    return frozenset(layer for layer, kind in enumerate(types) if kind in _CARRIES)


def _time_steps(config: Mapping[str, Any]) -> tuple[float, float]:
    given = config.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    try:
        # JSON has no infinity: transformers writes an object that names it.
        least, most = (float(one["__float__"]) if isinstance(one, dict) else float(one) for one in given)
    except (TypeError, ValueError, KeyError):
        least = most = math.nan
    if not 0 <= least < most:
        raise ValueError(f"config.json: time_step_limit is {given!r}; want two numbers, the lesser one first")
    return least, most
