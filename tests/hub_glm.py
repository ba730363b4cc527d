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
