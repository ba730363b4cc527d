"""Tiny shapes of Mistral's later families, as transformers' configurations have them."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
)

from families_latents import LATENTS

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # transformers 5.23 leaves it out
_GROWING: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.7,
    }
}
"""Queries do from 8 tokens on."""

OF_MISTRAL: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "ministral": (
        MinistralConfig,
        {
            "head_dim": 24,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (Ministral3Config, {"head_dim": 24, **_GROWING}),
    "mistral4": (
        Mistral4Config,
        {
            **LATENTS,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**_GROWING["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
}
