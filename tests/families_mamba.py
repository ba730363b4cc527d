"""Tiny shapes of the families with Mamba-2 layers, as transformers' configurations have them."""

from typing import Any

from transformers import GraniteMoeHybridConfig, NemotronHConfig, PreTrainedConfig

_GRANITE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

OF_MAMBA: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "granite-h": (
        GraniteMoeHybridConfig,
        {
            **_GRANITE,
            "intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 80,
        },
    ),
    # No experts; heads that are no power of two.
    "granite-h-dense": (
        GraniteMoeHybridConfig,
        {
            **_GRANITE,
            "hidden_size": 96,
            "tie_word_embeddings": True,
            "mamba_n_groups": 2,
            "mamba_d_head": 48,
            "mamba_conv_bias": False,
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "position_embedding_type": "rope",
        },
    ),
    # No Mamba.
    "granite-4": (
        GraniteMoeHybridConfig,
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 72,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.5,
        },
    ),
    # Mamba and attention behind each other; experts here and an MLP there, and nothing behind the last.
    "nemotron-h": (
        NemotronHConfig,
        {
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp", "mamba"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 80,
            "routed_scaling_factor": 1.7,
        },
    ),
}
