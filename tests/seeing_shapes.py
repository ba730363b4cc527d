"""Tiny shapes of every kind of models that see, as transformers' configurations have them."""

from typing import Any

from transformers import (
    Gemma3Config,
    Gemma4Config,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    InternVLConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from families import FAMILIES, SHAPE

MERGE = 2
"""Patches of a token's side."""
GEMMAS_LENGTH = 4
"""Tokens along the side of each of its images, which together are longer than its window."""
TILES_LENGTH = 3
"""The same of InternVL's tiles."""
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_IN_PART = {**_SECTIONS, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
_EYES: dict[str, Any] = {"depth": 3, "num_heads": 2, "spatial_merge_size": MERGE}
_LATER = {**_EYES, "hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 52, "patch_size": 4}
_TOWER = {
    "model_type": "pixtral",
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 48,
    "intermediate_size": 52,
    "patch_size": 4,
    "hidden_act": "silu",
}
SHAPES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        Qwen2VLConfig,
        {**_EYES, "embed_dim": 48, "hidden_size": 64, "patch_size": 4},
        {**SHAPE, "rope_parameters": _SECTIONS},
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLConfig,
        {**_LATER, "fullatt_block_indexes": [1], "window_size": 16},
        {**SHAPE, "rope_parameters": _SECTIONS},
    ),
    "qwen3-vl": (
        Qwen3VLConfig,
        {**_LATER, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36},
        {**SHAPE, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}, "head_dim": 16},
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeConfig,
        {**_LATER, "deepstack_visual_indexes": [1], "num_position_embeddings": 36},
        {
            **SHAPE,
            "rope_parameters": {**_SECTIONS, "mrope_interleaved": True},
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3.5": (
        Qwen3_5Config,
        {**_LATER, "num_position_embeddings": 36},
        {**SHAPE, **FAMILIES["qwen3.5"][1], "rope_parameters": _IN_PART},
    ),
    "mistral3": (Mistral3Config, _TOWER, {**SHAPE, "model_type": "mistral", "sliding_window": None}),
    "gemma3": (
        Gemma3Config,
        {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "hidden_size": 48,
            "intermediate_size": 52,
            "patch_size": 4,
            "image_size": GEMMAS_LENGTH * MERGE * 4,
        },
        {**SHAPE, **FAMILIES["gemma3"][1], "final_logit_softcapping": None},
    ),
    "internvl": (
        InternVLConfig,
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "hidden_size": 48,
            "intermediate_size": 52,
            "patch_size": 4,
            "image_size": TILES_LENGTH * MERGE * 4,
            "attention_bias": True,
        },
        {**SHAPE, "model_type": "qwen3", "head_dim": 16},
    ),
}
_GLMS_EYES = {**_LATER, "image_size": 24, "rms_norm_eps": 1e-3}
_HALF = {**_SECTIONS, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
SHAPES |= {
    "glm4v": (Glm4vConfig, _GLMS_EYES, {**SHAPE, "rope_parameters": _HALF}),
    "glm4v-moe": (
        Glm4vMoeConfig,
        {**_GLMS_EYES, "attention_bias": True},
        {
            **SHAPE,
            "rope_parameters": {**_HALF, "mrope_section": [1, 3, 2]},
            "head_dim": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm46v": (
        Glm46VConfig,
        {**_GLMS_EYES, "model_type": "glm4v_vision"},
        {**SHAPE, "model_type": "glm4v_text", "rope_parameters": _HALF},
    ),
}
_GEMMA_4S_EYES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_size": 48,
    "intermediate_size": 52,
    "patch_size": 4,
    "pooling_kernel_size": MERGE,
    "position_embedding_size": 200,
    "standardize": True,
}
SHAPES |= {
    "gemma4": (
        Gemma4Config,
        _GEMMA_4S_EYES,
        {**SHAPE, **FAMILIES["gemma4"][1], "use_bidirectional_attention": "vision"},
    ),
    "gemma4-told": (
        Gemma4Config,
        {**_GEMMA_4S_EYES, "standardize": False, "use_clipped_linears": True},
        {**SHAPE, **FAMILIES["gemma4-told"][1], "pad_token_id": 7},
    ),
}
_OF_128 = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 128, "num_attention_heads": 4}
LARGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        {"embed_dim": 160, "hidden_size": 256},
        {"hidden_size": 256, "intermediate_size": 320, "rope_parameters": {**_SECTIONS, "mrope_section": [8, 12, 12]}},
    ),
    "qwen2.5-vl": (
        {"hidden_size": 160, "intermediate_size": 212, "out_hidden_size": 256},
        {"hidden_size": 256, "intermediate_size": 320, "rope_parameters": {**_SECTIONS, "mrope_section": [8, 12, 12]}},
    ),
    "qwen3-vl": (
        {"hidden_size": 144, "intermediate_size": 212, "out_hidden_size": 256},
        {**_OF_128, "rope_parameters": {**_SECTIONS, "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
    ),
    "qwen3.5": (
        {"hidden_size": 144, "intermediate_size": 212, "out_hidden_size": 256},
        {
            **_OF_128,
            "rope_parameters": {**_IN_PART, "mrope_section": [6, 5, 5]},
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "qwen3-vl-moe": (
        {"hidden_size": 144, "intermediate_size": 212, "out_hidden_size": 256},
        {**_OF_128, "rope_parameters": {**_SECTIONS, "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
    ),
    "mistral3": ({"hidden_size": 128, "intermediate_size": 212}, _OF_128),
    "gemma3": ({"hidden_size": 144, "intermediate_size": 212}, {**_OF_128, "head_dim": 256}),
    "internvl": ({"hidden_size": 128, "intermediate_size": 212}, _OF_128),
}
_GLMS = (
    {"hidden_size": 128, "intermediate_size": 212, "out_hidden_size": 256},
    {
        "hidden_size": 256,
        "intermediate_size": 320,
        "rope_parameters": {**_HALF, "mrope_section": [4, 6, 6]},
    },
)
LARGE |= {
    "glm4v": _GLMS,
    "glm4v-moe": (_GLMS[0], {**_OF_128, "rope_parameters": {**_HALF, "mrope_section": [8, 12, 12]}}),
    "glm46v": _GLMS,
}
_GEMMA_4S = (
    {"hidden_size": 144, "intermediate_size": 212, "head_dim": 72},
    {**_OF_128, "head_dim": 256, "global_head_dim": 512},
)
LARGE |= {
    "gemma4": _GEMMA_4S,
    "gemma4-told": (
        # With more layers, whose sums are as large as they come, transformers in fp32 and in fp64 say different tokens.
        {**_GEMMA_4S[0], "num_hidden_layers": 1, "intermediate_size": 216},
        {**_GEMMA_4S[1], "hidden_size_per_layer_input": 256},
    ),
}
"""Heads of sizes that kernels for GPUs serve: eyes, then the language model."""
