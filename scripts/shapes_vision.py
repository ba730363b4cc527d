"""What config.json says of public models that see: of what sees, and of the language model."""

from typing import Any

_EYE_OF_QWEN3: dict[str, Any] = {
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


GEMMAS_MARKS = {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144}
"""Words around an image, and what its tokens take the place of."""

INTERNVLS_WORDS = {151669: "<img>", 151670: "</img>"}
"""The same of a tokenizer whose settings are silent."""


def qwen3_vl(dense: dict[str, Any]) -> dict[str, Any]:
    """Of a language model of Qwen3's."""
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {**dense, "max_position_embeddings": 262144, "rope_theta": 5_000_000, "rope_scaling": rope}
    eye = {**_EYE_OF_QWEN3, "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": dense["hidden_size"]}
    kind = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655}
    return _whole(kind, text, "qwen3_vl_text", {**eye, "model_type": "qwen3_vl"})


def qwen3_5_seeing(text: dict[str, Any]) -> dict[str, Any]:
    """Of a language model of Qwen3.5's."""
    eye = {**_EYE_OF_QWEN3, "out_hidden_size": text["hidden_size"], "model_type": "qwen3_5"}
    kind = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056}
    return _whole(kind, text, "qwen3_5_text", eye)


def gemma3() -> dict[str, Any]:
    """Of 4B."""
    eye = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    text = {
        "head_dim": 256,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 262208,
    }
    kind = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    return {**_whole(kind, text, "gemma3_text", eye), **GEMMAS_MARKS, "mm_tokens_per_image": 256}


def glm4v() -> dict[str, Any]:
    """Of 9B."""
    eye = {
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "intermediate_size": 13696,
        "model_type": "glm4v",
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    text = {
        "attention_bias": True,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151552,
    }
    kind = {"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v", "image_token_id": 151343}
    return _whole(kind, text, "glm4v_text", eye)


def internvl(dense: dict[str, Any]) -> dict[str, Any]:
    """Of a language model of Qwen3's, with the tower that all but the largest have."""
    eye = {
        "attention_bias": True,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "model_type": "internvl_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
    }
    kind = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "image_token_id": 151671}
    return {**_whole(kind, dense, "qwen3", eye), "downsample_ratio": 0.5, "image_seq_length": 256}


def _whole(kind: dict[str, Any], text: dict[str, Any], text_kind: str, eye: dict[str, Any]) -> dict[str, Any]:
    alone = {name: value for name, value in text.items() if name != "architectures"}
    shared = {"tie_word_embeddings": text["tie_word_embeddings"], "torch_dtype": text["torch_dtype"]}
    return {**kind, **shared, "text_config": {**alone, "model_type": text_kind}, "vision_config": eye}
