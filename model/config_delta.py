"""What a config.json says of layers that carry a state and follow the gated delta rule.

Knows the families that have them, and what transformers assumes of those; knows no other field.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.blocks import Delta
from tercet.model.config_fields import positive

LINEAR = "linear_attention"
_FULL = "full_attention"
_MOST_TAPS = 8
_DELTA: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
DELTA_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS, "vocab_size": 151936, "intermediate_size": 5632, "num_experts_per_tok": 10},
    "qwen3_5_text": {**_DELTA, "vocab_size": 248320, "num_key_value_heads": 4},
    # No layer of theirs has one MLP.
    "qwen3_5_moe_text": {
        **_DELTA, **_EXPERTS, "vocab_size": 248320, "intermediate_size": 512, "num_experts_per_tok": 8,
    },
}  # fmt: skip
"""The families that have such layers; of each, what transformers assumes where config.json is silent."""


def delta(config: Mapping[str, Any], family: str) -> Delta | None:
    """What most layers have in place of keys and values, if the family has that; None too where no layer has it."""
    if family not in DELTA_DEFAULTS:
        return None
    layers = _layers(config)
    if not layers:
        return None
    key_heads, value_heads = positive(config, "linear_num_key_heads"), positive(config, "linear_num_value_heads")
    if value_heads % key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads is {value_heads}; want a multiple of linear_num_key_heads "
            f"({key_heads})"
        )
    dims = {name: positive(config, name) for name in ("linear_key_head_dim", "linear_value_head_dim")}
    for name, dim in dims.items():
        if not 16 <= dim <= 128 or dim & (dim - 1):
            raise ValueError(f"config.json: {name} is {dim}; supported: 16, 32, 64 and 128")
    taps = positive(config, "linear_conv_kernel_dim")
    if not 2 <= taps <= _MOST_TAPS:
        raise ValueError(f"config.json: linear_conv_kernel_dim is {taps}; supported: 2 to {_MOST_TAPS}")
    return Delta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=dims["linear_key_head_dim"],
        value_dim=dims["linear_value_head_dim"],
        taps=taps,
        layers=layers,
        by_key_heads=family == "qwen3_next",
    )


def _layers(config: Mapping[str, Any]) -> frozenset[int]:
    """As layer_types has them, or all but every so many."""
    num_layers, types = positive(config, "num_hidden_layers"), config.get("layer_types")
    if types is None:
        interval = positive(config, "full_attention_interval")
        types = [_FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (LINEAR, _FULL) for kind in types):
        raise ValueError(f"config.json: layer_types is {types!r}; want {LINEAR} or {_FULL} for each of {num_layers}")
    if _FULL not in types:
        raise ValueError(f"config.json: layer_types has no {_FULL}; want one at least")
    return frozenset(layer for layer, kind in enumerate(types) if kind == LINEAR)
