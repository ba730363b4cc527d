"""Tiny shapes of families whose heads are turned or normed in ways of their own, or MLPs without gates, as
transformers' configurations have them."""

from typing import Any

from transformers import (
    ArceeConfig,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    PreTrainedConfig,
)

_ALPHA = {"rope_parameters": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10_000.0}}

OF_TURNING: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "ernie4.5": (Ernie4_5Config, {"head_dim": 24}),
    "ernie4.5-bias": (Ernie4_5Config, {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False}),
    # Without padding: transformers makes its row of the embedding zeros when it loads one.
    "ernie4.5-moe": (
        Ernie4_5_MoeConfig,
        {
            "pad_token_id": None,
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 40,
            "moe_layer_end_index": 2,
        },
    ),
    "arcee": (ArceeConfig, {"hidden_act": "relu2"}),
    "arcee-bias": (
        ArceeConfig,
        {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan": (HunYuanDenseV1Config, {"head_dim": 24, "tie_word_embeddings": True, **_ALPHA}),
    "hunyuan-bias": (HunYuanDenseV1Config, {"head_dim": 24, "attention_bias": True}),
    "hunyuan-moe": (
        HunYuanMoEV1Config,
        {"head_dim": 24, "num_experts": 6, "moe_topk": [3] * 3, "intermediate_size": 40, **_ALPHA},
    ),
    "exaone4": (Exaone4Config, {"head_dim": 24, "sliding_window": 12, "sliding_window_pattern": 2}),
    "exaone4-whole": (Exaone4Config, {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
}
