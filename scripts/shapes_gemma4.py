"""Shapes of Gemma 4's language models: a large dense one, one with experts, and a small one."""

from typing import Any


def _gemma4(layers: int, period: int, **own: Any) -> dict[str, Any]:
    """Of each `period` layers the last sees everything."""
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": kinds,
        "num_hidden_layers": layers,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 262144,
        **own,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "gemma-4-31b": _gemma4(
        60, 6, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
        attention_k_eq_v=True, num_global_key_value_heads=4,
    ),
    "gemma-4-26b-a4b": _gemma4(
        30, 6, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
        attention_k_eq_v=True, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-e2b": _gemma4(
        35, 5, hidden_size=1536, intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1,
        hidden_size_per_layer_input=256, num_kv_shared_layers=20, use_double_wide_mlp=True, sliding_window=512,
    ),
}  # fmt: skip
