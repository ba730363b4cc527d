"""What a config.json says of latents, from which heads' keys and values are made.

Knows the families that have them, and what transformers assumes of those; knows no other field.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.blocks import Latent
from tercet.model.config_fields import flag, number, positive

_LATENTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LATENT_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_LATENTS,
        "max_position_embeddings": 2048,
        "vocab_size": 102400,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        **_LATENTS,
        "rope_interleave": True,
        "max_position_embeddings": 4096,
        "vocab_size": 129280,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
    },
    "mistral4": {
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "max_position_embeddings": 1048576,
        "vocab_size": 131072,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "glm4_moe_lite": {
        **_LATENTS,
        "rope_interleave": True,
        "max_position_embeddings": 202752,
        "vocab_size": 154880,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "youtu": {
        **_LATENTS,
        "rope_interleave": True,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "minicpm3": {
        "max_position_embeddings": 32768,
        "vocab_size": 73448,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
}
"""The families that have latents; of each, what transformers assumes where config.json is silent."""


def latent(config: Mapping[str, Any], family: str) -> Latent | None:
    """What the model's cache holds in place of keys and values, if its family has that.

    How many heads of keys there are, and of which size, follows, whatever other fields say.
    """
    if family not in LATENT_DEFAULTS:
        return None
    in_pairs = family == "deepseek_v2" or (family != "minicpm3" and flag(config, "rope_interleave"))
    return Latent(
        rank=positive(config, "kv_lora_rank"),
        q_rank=0 if config["q_lora_rank"] is None else positive(config, "q_lora_rank"),
        still=positive(config, "qk_nope_head_dim"),
        turned=positive(config, "qk_rope_head_dim"),
        value=positive(config, "v_head_dim", share_of_head(config) if family == "minicpm3" else None),
        in_pairs=in_pairs,
    )


def without_turned_share(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what rope parameters say of how much of a query turns, which other fields say too."""
    config, turned = dict(config), positive(config, "qk_rope_head_dim")
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(name), Mapping) and rope.get("partial_rotary_factor") is not None:
            share = number(rope, "partial_rotary_factor", 1.0)
            if int(share * (turned + positive(config, "qk_nope_head_dim"))) != turned:
                raise ValueError(
                    f"config.json: partial_rotary_factor is {share}; want that of qk_rope_head_dim ({turned})"
                )
            config[name] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    return config


def size_of_head(config: Mapping[str, Any]) -> int:
    """How many numbers a head has, where there are no latents."""
    return positive(config, "head_dim") if "head_dim" in config else share_of_head(config)


def share_of_head(config: Mapping[str, Any]) -> int:
    """How many numbers a head has where nothing is said of them: its part of as many as hidden states have."""
    hidden_size, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(
            f"config.json: hidden_size is {hidden_size}; want a multiple of num_attention_heads ({num_heads})"
        )
    return hidden_size // num_heads
