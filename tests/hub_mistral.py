"""What config.json of public models of Mistral's says, whose queries grow: language models beside what sees."""

from typing import Any

_EYES: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "image_size": 1540,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "pixtral",
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_WHOLE: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "transformers_version": "5.0.0.dev0",
    "vision_config": _EYES,
    "vision_feature_layer": -1,
}
_FP8: dict[str, Any] = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
_YARN: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_type": "yarn",
    "type": "yarn",
}
_TEXT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "num_attention_heads": 32,
    "sliding_window": None,
    "use_cache": True,
    "vocab_size": 131072,
}
_OF_THE_THIRD: dict[str, Any] = {
    **_TEXT,
    "head_dim": 128,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {**_YARN, "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0},
}
MINISTRAL_3_8B: dict[str, Any] = {**_WHOLE, "text_config": _OF_THE_THIRD, "quantization_config": _FP8}
MISTRAL_SMALL_4: dict[str, Any] = {
    **_WHOLE,
    "tie_word_embeddings": False,
    "quantization_config": _FP8,
    "text_config": {
        **_TEXT,
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "intermediate_size": 12288,
        "kv_lora_rank": 256,
        "max_position_embeddings": 1048576,
        "model_type": "mistral4",
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 32,
        "output_router_logits": False,
        "pretraining_tp": 1,
        "q_lora_rank": 1024,
        "qk_head_dim": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_interleave": True,
        "rope_parameters": {
            **_YARN,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "v_head_dim": 128,
    },
}
MISTRAL_MEDIUM_3_5: dict[str, Any] = {
    **MINISTRAL_3_8B,
    "text_config": {
        **_OF_THE_THIRD,
        "hidden_size": 12288,
        "intermediate_size": 28672,
        "num_attention_heads": 96,
        "num_hidden_layers": 88,
        "rope_parameters": {
            **_YARN,
            "factor": 64.0,
            "llama_4_scaling_beta": 0,
            "mscale_all_dim": 0.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 1000000.0,
        },
    },
}
