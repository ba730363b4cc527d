"""What config.json of public models of GLM says, but for tokens."""

from typing import Any

_GLM: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151552,
}
GLM_4_9B_CHAT: dict[str, Any] = {
    **_GLM,
    "architectures": ["GlmForCausalLM"],
    "model_type": "glm",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
}
GLM_4_9B: dict[str, Any] = {
    **_GLM,
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
}
GLM_4_32B: dict[str, Any] = {
    **GLM_4_9B,
    "attention_bias": False,
    "hidden_size": 6144,
    "intermediate_size": 23040,
    "num_attention_heads": 48,
    "num_hidden_layers": 61,
    "num_key_value_heads": 8,
}
"""And GLM-Z1's, which may be asked for longer texts as this says."""
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_EYE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "depth": 24,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "image_size": 336,
    "in_channels": 3,
    "initializer_range": 0.02,
    "num_heads": 12,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_MARKS = {
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
}
_IN_THREE = {"rope_type": "default", "mrope_section": [8, 12, 12]}
GLM_4_1V: dict[str, Any] = {
    **_MARKS,
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "image_token_id": 151343,
    "video_token_id": 151344,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {
        **{name: value for name, value in _GLM.items() if name not in ("head_dim", "tie_word_embeddings")},
        "image_token_id": 151343,
        "video_token_id": 151344,
        "max_position_embeddings": 65536,
        "model_type": "glm4v_text",
        "rms_norm_eps": 1e-05,
        "rope_scaling": _IN_THREE,
    },
    "vision_config": {**_EYE, "intermediate_size": 13696, "model_type": "glm4v"},
}
"""And that of GLM-4.6V-Flash."""
GLM_4_5V: dict[str, Any] = {
    **GLM_4_1V,
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "image_token_id": 151363,
    "video_token_id": 151364,
    "text_config": {
        **_GLM,
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "max_position_embeddings": 65536,
        "model_type": "glm4v_moe_text",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": _IN_THREE,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "vision_config": {**_EYE, "intermediate_size": 10944, "model_type": "glm4v_moe"},
}
"""And that of GLM-4.6V."""
PROCESSOR: dict[str, Any] = {
    "do_rescale": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Glm4vImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "merge_size": 2,
    "patch_size": 14,
    "processor_class": "Glm4vProcessor",
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    "temporal_patch_size": 2,
}
"""What preprocessor_config.json of all of them says."""
