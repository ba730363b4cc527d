"""Fields of a config.json that say nothing about the numbers of a forward pass, of all families or of some."""

from typing import Any

# Known to say nothing about the numbers of a forward pass. `pretraining_tp` only cuts a product into slices.
HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "_name_or_path",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "residual_dropout",
        "cache_implementation",
        "_sliding_window_pattern",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "pretraining_tp",
        "is_llama_config",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "num_labels",
        "sentence_transformers",
    }
)

# Fields above that transformers does not read for a family, with the values that say nothing there.
UNREAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"sliding_window": (None,), "use_sliding_window": (None, False)},
    **{
        family: {
            "use_sliding_window": (None, True),
            "max_window_layers": (None, 0),
            "attention_bias": (None, False),
            "mlp_bias": (None, False),
        }
        for family in ("mistral", "ministral", "ministral3", "phi3", "mixtral")
    },
    "qwen2": {"attention_bias": (None, False), "mlp_bias": (None, False)},
    "qwen3": {"mlp_bias": (None, False)},
    "smollm3": {"max_window_layers": (None, 0, 28)},
    "apertus": {"sliding_window": (None,), "use_sliding_window": (None, False), "mlp_bias": (None, False)},
    "arcee": {"sliding_window": (None,), "use_sliding_window": (None, False)},
    "granite": {"sliding_window": (None,), "use_sliding_window": (None, False)},
    "olmo2": {"sliding_window": (None,), "use_sliding_window": (None, False), "mlp_bias": (None, False)},
    "exaone4": {"use_sliding_window": (None, False), "attention_bias": (None, False), "mlp_bias": (None, False)},
    "olmo3": {"use_sliding_window": (None, False), "mlp_bias": (None, False)},
    "seed_oss": {"sliding_window": (None,), "use_sliding_window": (None, False)},
    "gemma2": {"mlp_bias": (None, False)},
    "gemma3_text": {"mlp_bias": (None, False)},
    "gemma4_text": {"mlp_bias": (None, False)},
    "qwen2_moe": {"attention_bias": (None, False), "mlp_bias": (None, False)},
    "qwen3_moe": {"mlp_bias": (None, False)},
    "olmoe": {"sliding_window": (None,), "use_sliding_window": (None, False), "mlp_bias": (None, False)},
    "glm": {"sliding_window": (None,), "use_sliding_window": (None, False), "mlp_bias": (None, False)},
    "glm4": {"sliding_window": (None,), "use_sliding_window": (None, False), "mlp_bias": (None, False)},
    "glm4_moe": {"sliding_window": (None,), "use_sliding_window": (None, False), "mlp_bias": (None, False)},
    "gpt_oss": {"use_sliding_window": (None,), "mlp_bias": (None, False)},
    "dots1": {"use_sliding_window": (None, False), "mlp_bias": (None, False)},
    **{
        family: {
            "sliding_window": (None,),
            "use_sliding_window": (None, False),
            "attention_bias": (None, False),
            "mlp_bias": (None, False),
        }
        for family in ("ernie4_5", "ernie4_5_moe")
    },
    **{
        family: {"sliding_window": (None,), "use_sliding_window": (None, False), "mlp_bias": (None, False)}
        for family in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    },
    "minimax_m2": {
        "sliding_window": (None,),
        "use_sliding_window": (None, False),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
    },
    **{
        family: {"sliding_window": (None,), "use_sliding_window": (None, False)}
        for family in (
            *("deepseek_v2", "deepseek_v3", "mistral4", "glm4_moe_lite", "youtu", "minicpm3"),
            *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
            *("granitemoehybrid", "nemotron_h"),
        )
    },
}
