"""What config.json of public models says, of families whose heads are turned or normed in ways of their own."""

from typing import Any

_ERNIE: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": False,
    "vocab_size": 103424,
}
ERNIE_4_5_SMALL: dict[str, Any] = {
    **_ERNIE,
    "architectures": ["Ernie4_5ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
}
ERNIE_4_5_A3B: dict[str, Any] = {
    **_ERNIE,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_gate_act": "softmax",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_norm_min": 1e-12,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
}
