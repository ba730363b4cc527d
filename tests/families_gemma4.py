"""Tiny shapes of Gemma 4's language models: dense ones, with experts, and with what layers are told and borrow."""

from typing import Any

from transformers import Gemma4TextConfig, PreTrainedConfig

_GEMMA4: dict[str, Any] = {
    "head_dim": 24,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.3,
            "rope_theta": 50_000.0,
            "factor": 1.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    },
}

OF_GEMMA4: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gemma4": (Gemma4TextConfig, _GEMMA4),
    "gemma4-moe": (
        Gemma4TextConfig,
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 40},
    ),
    "gemma4-told": (
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "rms_norm_eps": 0.02,  # which tells whether it is scaled where what is normed is
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 419,  # as many as there are
            "hidden_size_per_layer_input": 12,
        },
    ),
}
