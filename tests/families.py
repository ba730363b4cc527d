"""Tiny shapes of every family of models, as transformers' configurations have them."""

from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    YoutuConfig,
)

from families_delta import OF_DELTA
from families_gemma4 import OF_GEMMA4
from families_mamba import OF_MAMBA

VOCAB_SIZE = 419
"""Prime: no number of ranks divides it."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def _longrope(original: int, **parameters: Any) -> dict[str, Any]:
    """Of which 12 of 16 numbers turn."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}
    scaling = {"type": "longrope", **factors, **parameters}
    return {"rope_scaling": scaling, "partial_rotary_factor": 0.75, "original_max_position_embeddings": original}


_LATENTS: dict[str, Any] = {
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

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-bias-tied": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-mha-head-dim": (LlamaConfig, {"num_key_value_heads": 4, "head_dim": 24}),
    "llama3": (
        LlamaConfig,
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-linear": (LlamaConfig, _rope("linear", factor=4.0)),
    "llama-dynamic": (LlamaConfig, _rope("dynamic", factor=4.0)),
    "llama-yarn": (LlamaConfig, _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "smollm2": (
        LlamaConfig,
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "phi3": (Phi3Config, {"sliding_window": 16, "hidden_size": 72, "num_attention_heads": 6}),
    "phi3-short": (Phi3Config, _longrope(512, attention_factor=1.3)),
    "phi3-long": (Phi3Config, {**_longrope(8), "tie_word_embeddings": True}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 24,
            "sliding_window": 12,
            "query_pre_attn_scalar": 80,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (
        Olmo3Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
    "seed-oss": (SeedOssConfig, {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 16}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 72,
            "decoder_sparse_step": 2,
        },
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2}),
    "glm4-moe": (
        Glm4MoeConfig,
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
        },
    ),
    "dots1": (
        Dots1Config,
        {
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        # The rotary part twice: transformers before 5.18 leaves `rotary_dim` unread.
        {"head_dim": 24, "rotary_dim": 12, **_rope("default", partial_rotary_factor=0.5)}
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 24,
            "num_attention_heads": 6,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=128, truncate=False),
        },
    ),
    "deepseek-v2": (
        DeepseekV2Config,
        {
            **_LATENTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=0.9),
        },
    ),
    "deepseek-v2-groups": (
        DeepseekV2Config,
        {
            **_LATENTS,
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 1,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": (
        DeepseekV3Config,
        {
            **_LATENTS,
            **_GROUPS,
            "qk_rope_head_dim": 16,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            **_rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "glm4-moe-lite": (
        Glm4MoeLiteConfig,
        {
            **_LATENTS,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    # Without padding: transformers makes its row of the embedding zeros when it loads one.
    "youtu": (YoutuConfig, {**_LATENTS, "q_lora_rank": None, "rope_interleave": False, "pad_token_id": None}),
    "minicpm3": (
        MiniCPM3Config,
        {
            **_LATENTS,
            "v_head_dim": None,
            "scale_emb": 3.3,
            "dim_model_base": 16,
            **_rope(
                "longrope",
                original_max_position_embeddings=512,
                short_factor=[1.0, 1.2, 1.5, 2.0],
                long_factor=[1.0, 2.0, 4.0, 8.0],
                attention_factor=1.2,
                factor=1.0,  # transformers 5.17 wants one
            ),
        },
    ),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.3,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
            "logits_scaling": 7.0,
            "rms_norm_eps": 0.1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 12}),
    "smollm3-listed": (
        SmolLM3Config,
        {"no_rope_layers": [0, 1, 0], "attention_bias": True, "layer_types": ["full_attention"] * 3},
    ),
    **OF_GEMMA4,
    **OF_DELTA,
    **OF_MAMBA,
}
