"""Public Gemma 4 checkpoints, as their files describe them."""

from typing import Any

_ROPES: dict[str, Any] = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
}


def _text(layers: int, period: int, **own: Any) -> dict[str, Any]:
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "layer_types": kinds,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": layers,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPES,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        **own,
    }


_TEXTS: dict[str, dict[str, Any]] = {
    "31B": _text(
        60, 6, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
        attention_k_eq_v=True, num_global_key_value_heads=4,
    ),
    "26B-A4B": _text(
        30, 6, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
        attention_k_eq_v=True, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "E2B": _text(
        35, 5, hidden_size=1536, intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1,
        hidden_size_per_layer_input=256, num_kv_shared_layers=20, use_double_wide_mlp=True, sliding_window=512,
        max_position_embeddings=131072, use_bidirectional_attention=None,
    ),
    "E4B": _text(
        42, 6, hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=2,
        hidden_size_per_layer_input=256, num_kv_shared_layers=18, sliding_window=512, max_position_embeddings=131072,
        use_bidirectional_attention=None,
    ),
}  # fmt: skip


EYES: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "default_output_length": 280,
    "dtype": "bfloat16",
    "global_head_dim": 72,
    "head_dim": 72,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_vision",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": True,
    "use_clipped_linears": False,
}
"""Of the large ones."""
_SMALL_EYES: dict[str, Any] = {
    "global_head_dim": 64,
    "head_dim": 64,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 16,
    "num_key_value_heads": 12,
    "standardize": False,
    "use_clipped_linears": True,
}
PROCESSOR: dict[str, Any] = {
    "image_processor": {
        "do_convert_rgb": True,
        "do_normalize": False,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.0, 0.0, 0.0],
        "image_processor_type": "Gemma4ImageProcessor",
        "image_seq_length": 280,
        "image_std": [1.0, 1.0, 1.0],
        "max_soft_tokens": 280,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 224, "width": 224},  # which its image processor does not read
    },
    "image_seq_length": 280,
    "processor_class": "Gemma4Processor",
}


def whole(name: str, **text: Any) -> dict[str, Any]:
    """The whole config.json; `text`: what is other in its language model's part."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": "gemma4",
        "text_config": {**_TEXTS[name], **text},
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0",
        "video_token_id": 258884,
        "vision_config": EYES | (_SMALL_EYES if name.startswith("E") else {}),
        "vision_soft_tokens_per_image": 280,
    }
