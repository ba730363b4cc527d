"""Tiny shapes of the families of which some layers carry a state, as transformers' configurations have them."""

from typing import Any

from transformers import PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_DELTA_EXPERTS: dict[str, Any] = {
    **_DELTA,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}

OF_DELTA: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3-next": (Qwen3NextConfig, {**_DELTA_EXPERTS, "num_hidden_layers": 4, "mlp_only_layers": [1]}),
    # The last layer carries a state, too.
    "qwen3.5": (
        Qwen3_5TextConfig,
        {
            **_DELTA,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        {**_DELTA_EXPERTS, "linear_num_value_heads": 2, "linear_value_head_dim": 16, "full_attention_interval": 3},
    ),
}
