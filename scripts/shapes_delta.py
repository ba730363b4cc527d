"""What config.json says of public models of which most layers carry a state."""

from typing import Any

_HEADS: dict[str, Any] = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
}


def _qwen3_5(kind: str, hidden_size: int, num_layers: int, num_heads: int, value_heads: int, **more: Any) -> Any:
    return {
        **_HEADS,
        "architectures": [f"Qwen3_5{'Moe' if 'moe' in kind else ''}ForCausalLM"],
        "model_type": kind,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "hidden_size": hidden_size,
        "linear_num_value_heads": value_heads,
        "mamba_ssm_dtype": "float32",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _qwen3_5(
        *("qwen3_5_text", 1024, 24, 8, 16),
        intermediate_size=3584,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen3.5-9b": _qwen3_5("qwen3_5_text", 4096, 32, 16, 32, intermediate_size=12288),
    "qwen3.5-27b": _qwen3_5("qwen3_5_text", 5120, 64, 24, 48, intermediate_size=17408),
    "qwen3.5-35b-a3b": _qwen3_5(
        *("qwen3_5_moe_text", 2048, 40, 16, 32),
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_key_value_heads=2,
        shared_expert_intermediate_size=512,
    ),
    "qwen3-next-80b-a3b": {
        **_HEADS,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_num_value_heads": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
}
