"""Tiny shapes of Mistral's later families, as transformers' configurations have them."""

from typing import Any

from transformers import Ministral3Config, MinistralConfig, PreTrainedConfig

GROWING: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.7,
    }
}
"""Queries do from 16 tokens on."""

OF_MISTRAL: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "ministral": (
        MinistralConfig,
        {
            "head_dim": 24,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (Ministral3Config, {"head_dim": 24, **GROWING}),
}
