"""The families by the names of their architectures, and what transformers assumes where a config.json is silent.

Knows names and numbers; what a field means is in `config_fields.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.model.blocks import Norms
from tercet.model.config_delta import DELTA_DEFAULTS
from tercet.model.config_gemma4 import GEMMA4, GEMMA4_DEFAULTS
from tercet.model.config_latents import LATENT_DEFAULTS
from tercet.model.config_mamba import MAMBA_DEFAULTS
from tercet.model.expert_defaults import EXPERT_DEFAULTS

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "Exaone4ForCausalLM": "exaone4",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "SeedOssForCausalLM": "seed_oss",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Mistral4ForCausalLM": "mistral4",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "YoutuForCausalLM": "youtu",
    "MiniCPM3ForCausalLM": "minicpm3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
}
OTHER_NAMES = {"kimi_k2": "deepseek_v3", "youtu_llm": "youtu"}
"""What some files call a family, as their own code has it."""


def _named(ending: str) -> dict[str, str]:
    """The families by names that end so; those of a language model inside a larger one say what they are."""
    return {
        name.replace("ForCausalLM", f"Text{ending}" if family.endswith("_text") else ending): family
        for name, family in FAMILIES.items()
    }


# The same without what makes logits: models that were trained to embed texts are often saved so.
HEADLESS = _named("Model")
_NO_CLASSIFIERS = (
    *("apertus", "ernie4_5", "ernie4_5_moe"),
    *("granite", GEMMA4, "olmoe", "glm4_moe", "dots1", "minimax_m2", "glm4_moe_lite", "youtu", "qwen3_5_moe_text"),
    *MAMBA_DEFAULTS,
)
"""Of which transformers has none."""
# The same with a head that classifies in the place of what makes logits over the vocabulary.
CLASSIFIERS = {
    name: family for name, family in _named("ForSequenceClassification").items() if family not in _NO_CLASSIFIERS
}
_GLM: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "vocab_size": 151552,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
# What transformers assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "vocab_size": 32000},
    "mistral": {
        "max_position_embeddings": 131072,
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "ministral": {
        "max_position_embeddings": 131072,
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "ministral3": {
        "max_position_embeddings": 262144,
        "vocab_size": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "phi3": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "vocab_size": 32064,
        "rms_norm_eps": 1e-5,
    },
    "smollm3": {
        "max_position_embeddings": 32768,
        "vocab_size": 128256,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "granite": {"max_position_embeddings": 2048, "vocab_size": 32000, "attention_multiplier": 1.0},
    "olmo2": {"max_position_embeddings": 2048, "vocab_size": 50304, "rms_norm_eps": 1e-5},
    "olmo3": {
        "max_position_embeddings": 2048,
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
    },
    "apertus": {
        "max_position_embeddings": 65536,
        "vocab_size": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "arcee": {"max_position_embeddings": 4096, "vocab_size": 32000, "rms_norm_eps": 1e-5},
    "exaone4": {
        "max_position_embeddings": 2048,
        "vocab_size": 102400,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "hunyuan_v1_dense": {"max_position_embeddings": 2048, "vocab_size": 290943, "rms_norm_eps": 1e-5},
    "seed_oss": {
        "max_position_embeddings": 524288,
        "vocab_size": 155136,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    "gemma2": {
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    "ernie4_5": {
        "max_position_embeddings": 131072,
        "vocab_size": 103424,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    GEMMA4: GEMMA4_DEFAULTS,
    "glm": _GLM,
    "glm4": _GLM,
    **EXPERT_DEFAULTS,
    **LATENT_DEFAULTS,
    **DELTA_DEFAULTS,
    **MAMBA_DEFAULTS,
}
_BEHIND = Norms(
    ahead_of_attention=None,
    behind_attention="post_attention_layernorm",
    ahead_of_mlp=None,
    behind_mlp="post_feedforward_layernorm",
)
_AROUND = replace(_BEHIND, ahead_of_attention="input_layernorm", ahead_of_mlp="pre_feedforward_layernorm")
_NORMS = {
    **dict.fromkeys(("gemma2", "gemma3_text", GEMMA4), _AROUND),
    "glm4": Norms(behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm"),
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), _BEHIND),
    "apertus": Norms(ahead_of_attention="attention_layernorm", ahead_of_mlp="feedforward_layernorm"),
}
"""Of families that have others than most, or by other names."""
_NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "dots1", "exaone4", "apertus", GEMMA4)
"""Families that norm each query's head and each key's; there are others."""
_STACKED = {
    "glm": frozenset({"gate_up"}),
    "glm4": frozenset({"gate_up"}),
    "phi3": frozenset({"qkv", "gate_up"}),
}
_ACTIVATIONS = {"nemotron_h": "relu2", "arcee": "relu2", "apertus": "xielu"}
"""Of those whose MLPs have no gates."""
_TELLING_NULLS = (
    *("sliding_window", "num_key_value_heads", "attn_logit_softcapping", "final_logit_softcapping"),
    *("q_lora_rank", "v_head_dim", "rope_interleave", "scale_depth", "dim_model_base"),
    *("norm_topk_prob", "n_group", "topk_group"),
)
"""Where null is a choice and not silence: no window, as many as attention heads, no cap, queries from hidden states.
Where transformers can make nothing of it, or another thing than of silence, it is refused."""


def with_defaults(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields that say something, and what transformers assumes for those that are not there."""
    return {**_DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None or k in _TELLING_NULLS}}


def traits(family: str) -> dict[str, Any]:
    """The fields of a ModelConfig that follow from the family alone, whatever kind of file it is in."""
    shifts, is_olmo = family in ("gemma2", "gemma3_text"), family in ("olmo2", "olmo3")
    is_gemma, has_delta = shifts or family == GEMMA4, family in DELTA_DEFAULTS
    is_hunyuan = family in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    return {
        "family": family,
        "activation": "gelu" if is_gemma else _ACTIVATIONS.get(family, "silu"),
        "float32_norms": shifts or has_delta,
        "fits_float16": not is_gemma,
        "norms": _NORMS.get(family, Norms()),
        "turns_in_pairs": family in ("glm", "glm4", "ernie4_5", "ernie4_5_moe"),
        "qk_norm": has_delta or is_hunyuan or family in _NORMED,
        "qk_norm_behind": is_hunyuan,
        "value_norm": family == GEMMA4,
        "layer_scales": family == GEMMA4,
        "gated_attention": has_delta,
        "wide_qk_norm": is_olmo or family in ("olmoe", "minimax_m2"),
        "sinks": family == "gpt_oss",
        "stacked": _STACKED.get(family, frozenset()),
    }
