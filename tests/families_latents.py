"""Tiny shapes of the families whose cache holds latents, as transformers' configurations have them."""

from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    MiniCPM3Config,
    PreTrainedConfig,
    YoutuConfig,
)

LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


OF_LATENTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "deepseek-v2": (
        DeepseekV2Config,
        {
            **LATENTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            **rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=0.9),
        },
    ),
    "deepseek-v2-groups": (
        DeepseekV2Config,
        {
            **LATENTS,
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 1,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": (
        DeepseekV3Config,
        {
            **LATENTS,
            **_GROUPS,
            "qk_rope_head_dim": 16,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            **rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "glm4-moe-lite": (
        Glm4MoeLiteConfig,
        {
            **LATENTS,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    # Without padding: transformers makes its row of the embedding zeros when it loads one.
    "youtu": (YoutuConfig, {**LATENTS, "q_lora_rank": None, "rope_interleave": False, "pad_token_id": None}),
    "minicpm3": (
        MiniCPM3Config,
        {
            **LATENTS,
            "v_head_dim": None,
            "scale_emb": 3.3,
            "dim_model_base": 16,
            **rope(
                "longrope",
                original_max_position_embeddings=512,
                short_factor=[1.0, 1.2, 1.5, 2.0],
                long_factor=[1.0, 2.0, 4.0, 8.0],
                attention_factor=1.2,
                factor=1.0,  # transformers 5.17 wants one
            ),
        },
    ),
}
