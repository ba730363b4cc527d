"""Tiny shapes of every family of models, as transformers' configurations have them."""

from typing import Any

from transformers import (
    Dots1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
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
)

from families_delta import OF_DELTA
from families_gemma4 import OF_GEMMA4
from families_latents import OF_LATENTS, rope
from families_mamba import OF_MAMBA
from families_mistral import OF_MISTRAL
from families_turning import OF_TURNING

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


def _longrope(original: int, **parameters: Any) -> dict[str, Any]:
    """Of which 12 of 16 numbers turn."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}
    scaling = {"type": "longrope", **factors, **parameters}
    return {"rope_scaling": scaling, "partial_rotary_factor": 0.75, "original_max_position_embeddings": original}


FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-bias-tied": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-mha-head-dim": (LlamaConfig, {"num_key_value_heads": 4, "head_dim": 24}),
    "llama3": (
        LlamaConfig,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-linear": (LlamaConfig, rope("linear", factor=4.0)),
    "llama-dynamic": (LlamaConfig, rope("dynamic", factor=4.0)),
    "llama-yarn": (LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=128)),
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
    "glm": (GlmConfig, {"head_dim": 24, "rms_norm_eps": 1e-3}),
    "glm4": (
        Glm4Config,
        # 12 of 20 numbers turn.
        {"head_dim": 20, "num_key_value_heads": 4, **rope("yarn", factor=4.0, original_max_position_embeddings=128)}
        | {"partial_rotary_factor": 0.6, "tie_word_embeddings": True},
    ),
    "glm4-unbiased": (Glm4Config, {"head_dim": 16, "attention_bias": False}),
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
        {"head_dim": 24, "rotary_dim": 12, **rope("default", partial_rotary_factor=0.5)}
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
            **rope("yarn", factor=4.0, original_max_position_embeddings=128, truncate=False),
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
    **OF_LATENTS,
    **OF_MAMBA,
    **OF_MISTRAL,
    **OF_TURNING,
}
