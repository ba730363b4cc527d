"""From a GGUF file's metadata to a ModelConfig.

Knows llama.cpp's names for settings, and what llama.cpp knows of an architecture that no setting says. A setting that
would change the result and is not supported is refused by name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tercet.model.blocks import Experts
from tercet.model.config import MOST_LAYERS, ModelConfig
from tercet.model.config_defaults import traits
from tercet.model.config_experts import EXPERT_NAMES
from tercet.model.gguf_names import ARCHITECTURES, MIXTRAL, Architecture
from tercet.model.gguf_rope import Factors, gguf_rope, turned_part
from tercet.model.gguf_settings import Settings
from tercet.model.rope import Rope
from tercet.model.shard import EMBEDDING, LM_HEAD

_NO_ROPE_INTERVAL = 4
"""Of SmolLM3."""
_LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the one model of each family whose scores do not go by the size of a head."""


def architecture(source: str, metadata: Mapping[str, Any]) -> Architecture:
    """ValueError if the file is a part of one, or of an architecture that is not supported."""
    if (count := _field(source, metadata, "split.count", int, 1)) > 1:  # all but the first part lack the settings, too
        number = _field(source, metadata, "split.no", int) + 1
        raise ValueError(f"{source} is part {number} of {count}; want them merged (llama-gguf-split --merge)")
    name = _field(source, metadata, "general.architecture", str)
    if name not in ARCHITECTURES:
        raise ValueError(f"{source}: architecture is {name!r}; supported: {', '.join(ARCHITECTURES)}")
    return MIXTRAL if name == "llama" and metadata.get("llama.expert_count") else ARCHITECTURES[name]


def parse_metadata(
    source: str,
    metadata: Mapping[str, Any],
    family: str,
    shapes: Mapping[str, tuple[int, ...]],
    factors: Factors,
    dtype: torch.dtype,
) -> ModelConfig:
    """`shapes`: of all tensors but those of `factors`, by their Hugging Face names."""
    if EMBEDDING not in shapes:
        raise ValueError(f"{source}: tensor token_embd.weight is missing")
    take = Settings(source, metadata["general.architecture"], metadata)
    context_length = take.whole("context_length")
    hidden_size, num_heads = take.whole("embedding_length"), take.whole("attention.head_count")
    num_layers, intermediate_size = take.whole("block_count", most=MOST_LAYERS), take.whole("feed_forward_length")
    head_dim = take.whole("attention.key_length", hidden_size // num_heads)
    take.only("attention.value_length", head_dim)
    take.take("vocab_size")  # the embedding's own shape says it
    turned = take.whole("rope.dimension_count", head_dim)
    if turned != head_dim and (family != "phi3" or turned > head_dim):
        raise take.refusal("rope.dimension_count", turned, f"supported: {head_dim}, the head's size")
    # Whether the model was trained on longer texts; of Granite, whether positions turn heads at all.
    take.only("rope.scaling.finetuned", *((True,) if family == "granite" else (True, False)))
    rope = gguf_rope(take, factors, context_length, turned_part(turned, head_dim))
    if family == "gemma3_text" and rope.kind == "linear":
        context_length = int(context_length / rope.factor)  # theirs is the scaled length
    windows = _windows(take, family, num_layers)
    embeds = take.whole("pooling_type", 0, or_zero=True) > 0  # those files are silent on whether words have one matrix
    take.only("attention.causal", True)
    config = ModelConfig(
        **traits(family),  # but for norm_shift: these files have added it
        vocab_size=shapes[EMBEDDING][0],
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=take.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=take.number("attention.layer_norm_rms_epsilon"),
        embedding_multiplier=hidden_size**0.5 if family in _LARGEST else 1.0,
        rope=rope,
        max_position_embeddings=context_length,
        tie_word_embeddings=LM_HEAD not in shapes,
        generates=LM_HEAD in shapes or not embeds,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        o_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in shapes,
        experts=_experts(take, family, num_layers, intermediate_size),
        layer_windows=windows,
        layer_ropes=_layer_ropes(take, family, rope, windows, num_layers),
        dtype=dtype,
    )
    config = _scaled(take, config)
    take.check_all_taken()
    return config


def _scaled(take: Settings, config: ModelConfig) -> ModelConfig:
    """With the numbers by which hidden states, scores and logits are multiplied, and what these are kept within."""
    match config.family:
        case "granite":
            return replace(
                config,
                embedding_multiplier=take.number("embedding_scale", 1.0),
                residual_multiplier=take.number("residual_scale", 1.0),
                logits_scaling=take.number("logit_scale"),
                attention_scale=take.number("attention.scale", config.attention_scale),
            )
        case "gemma2" | "gemma3_text" as family:
            is_largest = config.num_layers == _LARGEST[family]
            caps = (50.0, 30.0) if family == "gemma2" else (0.0, 0.0)
            return replace(
                config,
                attention_scale=(config.hidden_size // config.num_heads if is_largest else config.head_dim) ** -0.5,
                attention_softcap=take.number("attn_logit_softcapping", caps[0], or_zero=True),
                logit_softcap=take.number("final_logit_softcapping", caps[1], or_zero=True),
            )
    return config


def _windows(take: Settings, family: str, num_layers: int) -> tuple[int, ...]:
    """How many tokens back each layer sees, 0: all."""
    match family:
        case "phi3":
            return (take.whole("attention.sliding_window", or_zero=True),) * num_layers
        case "gemma2":
            window, slides = take.whole("attention.sliding_window", 4096), _pattern(take, 2, num_layers)
        case "gemma3_text":
            window, slides = take.whole("attention.sliding_window", 0, or_zero=True), _pattern(take, 6, num_layers)
        case _:
            return ()
    return tuple(window if slide else 0 for slide in slides)


def _pattern(take: Settings, period: int, num_layers: int) -> list[bool]:
    """Which layers have a window: all but every so many, or as a list says."""
    name = "attention.sliding_window_pattern"
    given = take.take(name, period)
    if isinstance(given, list) and len(given) == num_layers and all(isinstance(one, bool) for one in given):
        return given
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise take.refusal(name, given, f"want a positive whole number, or true or false for {num_layers} layers")
    return [(layer + 1) % given != 0 for layer in range(num_layers)]


def _layer_ropes(
    take: Settings, family: str, rope: Rope, windows: tuple[int, ...], num_layers: int
) -> tuple[Rope | None, ...]:
    match family:
        case "gemma3_text":
            local = Rope(take.number("rope.freq_base_swa", 10_000.0, above=1))
            return tuple(local if window else rope for window in windows)
        case "smollm3":
            return tuple(rope if (layer + 1) % _NO_ROPE_INTERVAL else None for layer in range(num_layers))
    return ()


def _experts(take: Settings, family: str, num_layers: int, intermediate_size: int) -> Experts | None:
    if family not in EXPERT_NAMES:
        return None
    count, each = take.whole("expert_count"), take.whole("expert_used_count")
    if each > count:
        raise take.refusal("expert_used_count", each, f"want no more than there are experts ({count})")
    take.only("expert_weights_norm", True)
    take.only("expert_weights_scale", 0.0, 1.0)
    take.only("expert_gating_func", 0, 1)  # softmax
    if family == "qwen3_moe":
        intermediate_size = take.whole("expert_feed_forward_length", intermediate_size // each)
    return Experts(
        count=count,
        each=each,
        intermediate_size=intermediate_size,
        normed=True,
        layers=frozenset(range(num_layers)),
        names=EXPERT_NAMES[family],
    )


def _field(source: str, metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = metadata.get(name, default)
    if not isinstance(value, kind):
        raise ValueError(f"{source}: {name} is {value!r}; want a {kind.__name__}")
    return value
