"""What config.json says of public models of which most layers are Mamba-2's."""

from typing import Any


def _granite(hidden_size: int, attends: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "init_method": "mup",
        "layer_types": ["attention" if layer in attends else "mamba" for layer in range(40)],
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "normalization_function": "rmsnorm",
        "num_hidden_layers": 40,
        "output_router_logits": False,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "granite-4.0-h-tiny": _granite(
        *(1536, (5, 15, 25, 35)),
        intermediate_size=512,
        logits_scaling=6,
        mamba_n_heads=48,
        num_attention_heads=12,
        num_experts_per_tok=6,
        num_key_value_heads=4,
        num_local_experts=64,
        shared_intermediate_size=1024,
    ),
    "granite-4.0-h-small": _granite(
        *(4096, (5, 15, 25, 35)),
        intermediate_size=768,
        logits_scaling=16,
        mamba_n_heads=128,
        num_attention_heads=32,
        num_experts_per_tok=10,
        num_key_value_heads=8,
        num_local_experts=72,
        shared_intermediate_size=1536,
    ),
}
