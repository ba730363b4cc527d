"""What fields of a config.json mean for each family: what is read, and what is refused by name.

A field that would change the result and is not supported is refused, so that no model ever runs wrong without a word.
Fields that transformers does not read for a family either are named in the log.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from tercet.model.config_unread import HARMLESS, UNREAD

log = logging.getLogger(__name__)
_FILE = "config.json"

# Fields that change the result in models near ours, with the values that leave it alone.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "per_layer_config": (None, {}),
    "attention_out_bias": (None, False),
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "attn_temperature_tuning": (None, False, 0),
    "llama_4_scaling": (None,),
    "alibi": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "parallel_attn": (None, False),
    "norm_type": (None, "rms_norm"),
    "lm_head_bias": (None, False),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
}

_GEMMA: dict[str, tuple[Any, ...] | None] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "query_pre_attn_scalar": None,
    "final_logit_softcapping": None,
}
_EXPERTS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob")),
    # Of training alone.
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")),
}
_QWEN_EXPERTS: dict[str, tuple[Any, ...] | None] = {
    **_EXPERTS,
    **dict.fromkeys(("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers")),
}
_GLM_EXPERTS: dict[str, tuple[Any, ...] | None] = {
    **_EXPERTS,
    **dict.fromkeys(("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "first_k_dense_replace")),
    "routed_scaling_factor": None,
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    # Layers behind the last that guess further tokens: they change nothing of these.
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers")),
}
_LATENTS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    "qk_head_dim": None,  # follows from two of those
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
}
_LATENTS_EXPERTS: dict[str, tuple[Any, ...] | None] = {
    **_LATENTS,
    **_GLM_EXPERTS,
    **dict.fromkeys(("n_group", "topk_group")),
    # Of training, and of how other programs deal experts out.
    **dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size")),
}
_DELTA: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")),
    **dict.fromkeys(("linear_conv_kernel_dim", "full_attention_interval")),
    "attention_bias": (None, False),
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "silu", "swish"),
    "mamba_ssm_dtype": (None, "float32"),
    # Of layers that guess further tokens.
    **dict.fromkeys(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")),
}
_MAMBA: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv")),
    **dict.fromkeys(("mamba_expand", "mamba_conv_bias", "time_step_limit", "layers_block_type")),
    "mamba_chunk_size": None,  # how other programs cut a prompt
    "mamba_proj_bias": (None, False),
    "attention_bias": (None, False),
}
_HUNYUAN: dict[str, tuple[Any, ...] | None] = {
    "norm_type": (None, "rms", "rms_norm"),
    "use_qk_norm": (None, True),
    "use_rotary_pos_emb": (None, True),
    "use_cla": (None, False),
    "add_classification_head": (None, False),
    "attention_head_dim": None,  # as head_dim
    # Of classes of their own, of training, and numbers of tokens.
    **dict.fromkeys(("cla_share_factor", "class_num", "dense_list", "pool_type", "enable_lm_head_fp32", "auto_map")),
    **dict.fromkeys(("org_vocab_size", "eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "mask_init_id")),
    **dict.fromkeys(("pad_id", "sep_token_id", "text_start_id", "text_end_id")),
}
# What families know in other ways. None: they read it, whatever it is.
_OWN: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "smollm3": dict.fromkeys(("no_rope_layers", "no_rope_layer_interval")),
    "granite": dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")),
    "gemma2": {**_GEMMA, "attn_logit_softcapping": None},
    "gemma3_text": {**_GEMMA, "rope_local_base_freq": None, "sliding_window_pattern": None},
    "apertus": {
        "hidden_act": (None, "xielu"),
        "qk_norm": (None, True),
        "post_norm": (None, False),
        "hidden_dropout": None,  # of training
    },
    "arcee": {"hidden_act": (None, "relu2")},
    "exaone4": {"sliding_window_pattern": None},
    "gemma4_text": {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "final_logit_softcapping": None,
        **dict.fromkeys(("per_layer_config", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")),
        **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input")),
        **dict.fromkeys(("num_kv_shared_layers", "use_double_wide_mlp")),
        **dict.fromkeys(("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")),
        "use_bidirectional_attention": (None, "vision"),  # of images, which are not served
    },
    "seed_oss": {"attention_out_bias": None},
    "hunyuan_v1_dense": {**_HUNYUAN, "num_experts": (None, 1)},
    "hunyuan_v1_moe": {
        **_HUNYUAN,
        **_EXPERTS,
        **dict.fromkeys(("moe_topk", "num_shared_expert", "moe_intermediate_size")),
        "norm_topk_prob": (None, True),
        "moe_layer_num_skipped": (None, 0),
        "use_mixed_mlp_moe": (None, True),
        "use_mla": (None, False),
        "group_limited_greedy": (None, False),
        "position_embedding_xdrope": (None, False),
        # What those three would read, and of training.
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "xdrope_section")),
        **dict.fromkeys(("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor")),
    },
    "mixtral": _EXPERTS,
    "qwen2_moe": {**_QWEN_EXPERTS, **dict.fromkeys(("shared_expert_intermediate_size", "qkv_bias"))},
    "qwen3_moe": _QWEN_EXPERTS,
    "olmoe": _EXPERTS,
    "glm4_moe": {**_GLM_EXPERTS, "use_qk_norm": None},
    "dots1": _GLM_EXPERTS,
    "gpt_oss": {
        **_EXPERTS,
        **dict.fromkeys(("swiglu_limit", "swiglu_alpha")),
        # As OpenAI's own files call what others say too.
        **dict.fromkeys(("experts_per_token", "initial_context_length")),
    },
    "ernie4_5": {"use_bias": None},
    "ernie4_5_moe": {
        **_EXPERTS,
        **dict.fromkeys(("moe_num_experts", "moe_k", "moe_intermediate_size", "moe_num_shared_experts")),
        **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")),
        "use_bias": (None, False),
        "moe_gate_act": (None, "softmax"),
        "moe_use_aux_free": (None, True),
        "moe_norm_min": (None, 1e-12),
        # Of training, and of layers that guess further tokens.
        **dict.fromkeys(("moe_gate", "moe_capacity", "num_nextn_predict_layers")),
    },
    "minimax_m2": {
        **_EXPERTS,
        **dict.fromkeys(("rotary_dim", "attn_type_list")),
        "scoring_func": (None, "sigmoid"),
        "use_routing_bias": (None, True),
        "use_qk_norm": (None, True),
        "qk_norm_type": (None, "per_layer"),
        "shared_intermediate_size": (None, 0),
        **dict.fromkeys(("use_mtp", "num_mtp_modules", "mtp_transformer_layers")),
    },
    "deepseek_v2": {
        **_LATENTS_EXPERTS,
        "scoring_func": (None, "softmax"),
        "topk_method": ("greedy", "group_limited_greedy"),
        # Transformers does not read it; DeepSeek's own code leaves the scale out where it is true.
        "norm_topk_prob": (None, False),
    },
    "deepseek_v3": {**_LATENTS_EXPERTS, "rope_interleave": None},
    "mistral4": {
        **_LATENTS_EXPERTS,
        "rope_interleave": None,
        "scoring_func": (None, "softmax"),
        "topk_method": (None, "greedy"),
        # Its groups would be as good as their best two experts together.
        **dict.fromkeys(("n_group", "topk_group"), (1,)),
    },
    "glm4_moe_lite": {**_LATENTS_EXPERTS, **dict.fromkeys(("rope_interleave", "mlp_layer_types"))},
    "youtu": {**_LATENTS, **dict.fromkeys(("rope_interleave", "embedding_initializer_range"))},
    "qwen3_next": {**_DELTA, **_QWEN_EXPERTS, "shared_expert_intermediate_size": None},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {
        **_DELTA,
        **_QWEN_EXPERTS,
        "shared_expert_intermediate_size": None,
        "norm_topk_prob": (None, True),
        "decoder_sparse_step": (None, 1),
        "mlp_only_layers": (None, []),
    },
    "granitemoehybrid": {
        **_MAMBA,
        **_EXPERTS,
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")),
        **dict.fromkeys(("shared_intermediate_size", "position_embedding_type")),
        "normalization_function": (None, "rmsnorm"),
        "init_method": None,
    },
    "nemotron_h": {
        **_EXPERTS,
        **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")),
        **dict.fromkeys(("use_conv_bias", "layer_norm_epsilon", "time_step_min", "hybrid_override_pattern")),
        **dict.fromkeys(("layers_block_type", "n_routed_experts", "n_shared_experts", "moe_intermediate_size")),
        **dict.fromkeys(("moe_shared_expert_intermediate_size", "routed_scaling_factor", "n_group", "topk_group")),
        "mlp_hidden_act": (None, "relu2"),
        "mamba_hidden_act": (None, "silu"),
        "moe_latent_size": (None,),
        "residual_in_fp32": (None, False),
        **dict.fromkeys(("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"), (None, False)),
        # How weights were begun with and trained, how other programs run, and layers that guess further tokens.
        **dict.fromkeys(("time_step_max", "time_step_floor", "time_step_limit", "rescale_prenorm_residual", "expand")),
        **dict.fromkeys(("hidden_dropout", "use_mamba_kernels", "chunk_size", "num_logits_to_keep", "auto_map")),
        **dict.fromkeys(("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_nextn_predict_layers")),
        **dict.fromkeys(("mtp_layers_block_type", "mtp_hybrid_override_pattern")),
    },
    "minicpm3": {**_LATENTS, **dict.fromkeys(("scale_emb", "scale_depth", "dim_model_base"))},
}


def check_fields(config: Mapping[str, Any], family: str) -> None:
    """Refuse what would change the result and is not supported; name what is not used."""
    known = {**_ONLY, **_OWN.get(family, {})}
    for name, allowed in known.items():
        if allowed is not None and name in config and config[name] not in allowed:
            wanted = ", ".join(repr(value) for value in allowed if value is not None) or "none"
            raise ValueError(
                f"config.json: {name} is {config[name]!r}, which would change the result; supported: {wanted}"
            )
    unread = {name for name, silent in UNREAD[family].items() if config.get(name) not in silent}
    if unused := sorted((set(config) - set(known) - HARMLESS) | unread):
        log.warning("config.json: fields without meaning for %s, which are not used: %s", family, ", ".join(unused))


def positive(
    config: Mapping[str, Any], name: str, default: int | None = None, most: int = 2**63 - 1, *, file: str = _FILE
) -> int:
    """A whole number over 0, or raise. `file`: what messages call it."""
    given = config.get(name)
    value = default if given is None else given
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{file}: {name} is {value!r}; want a positive whole number")
    if value > most:
        raise ValueError(f"{file}: {name} is {value}; want {most} at most")
    return value


def whole_number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """0 or one above it, or raise."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"config.json: {name} is {value!r}; want a whole number")
    return value


def number(config: Mapping[str, Any], name: str, default: float, *, file: str = _FILE) -> float:
    """A number over 0, or raise. `file`: what messages call it."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{file}: {name} is {value!r}; want a number over 0")
    return float(value)


def flag(config: Mapping[str, Any], name: str) -> bool:
    """True or false, or raise."""
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}; want true or false")
    return value
