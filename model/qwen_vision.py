"""What config.json says of the vision encoders of Qwen's families.

`vision_kinds.py` knows what sets these apart; this knows how fields become sizes, and what is refused.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import positive
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_fields import (
    ACTIVATIONS,
    check_agrees,
    check_only,
    heads_of,
    out_size_of,
    sections_of,
    theta_of,
    vision_fields,
)
from tercet.model.vision_kinds import Kind
from tercet.model.vision_pixels import normalisation

_EPS = 1e-6
"""Of all norms, in each of them."""


def qwen_vision(raw: Mapping[str, Any], kind: Kind, images: Mapping[str, Any]) -> VisionConfig:
    """From the whole config.json and the settings of images. ValueError names the field that is missing, wrong or not
    supported."""
    config = vision_fields(raw, kind.defaults)
    check_only(config, kind.only, "vision_config.")
    hidden, depth = positive(config, kind.hidden), positive(config, "depth")
    heads = heads_of(config, "num_heads", hidden)
    ratio = positive(config, "mlp_ratio") if "mlp_ratio" in kind.defaults else 0
    interleaved = not kind.early
    mean, deviation = normalisation(images, kind.normalisation)
    patch, merge = positive(config, "patch_size"), positive(config, "spatial_merge_size")
    check_agrees(images, patch_size=patch, merge_size=merge)
    return VisionConfig(
        num_layers=depth,
        hidden_size=hidden,
        num_heads=heads,
        inner_size=hidden * ratio if ratio else positive(config, "intermediate_size"),
        out_size=out_size_of(raw, kind.out, positive(config, kind.out)),
        patch=patch,
        frames=positive(config, "temporal_patch_size"),
        merge=merge,
        activation=ACTIVATIONS.get(config["hidden_act"], "silu"),
        eps=_EPS,
        out_eps=_EPS,
        rms_norms=kind.gated,
        patch_bias=not kind.early,
        out_bias=True,
        names="qwen2" if kind.early else "qwen3",
        theta=theta_of(config),
        shared_angles=True,
        positions=0 if kind.early else _side(config),
        window=_window(config, patch * merge) if kind.gated else 0,
        whole_layers=frozenset(_layers(config, "fullatt_block_indexes", depth)) if kind.gated else frozenset(),
        deep_layers=_layers(config, "deepstack_visual_indexes", depth) if kind.deep else (),
        sections=sections_of(raw, kind.sections, interleaved=interleaved),
        interleaved=interleaved,
        mean=mean,
        deviation=deviation,
    )


def _side(config: Mapping[str, Any]) -> int:
    count = positive(config, "num_position_embeddings")
    side = int(count**0.5 + 0.5)
    if side * side != count:
        raise ValueError(f"config.json: vision_config.num_position_embeddings is {count}; want a square")
    return side


def _window(config: Mapping[str, Any], side: int) -> int:
    """In tokens."""
    size = positive(config, "window_size")
    if size < side:
        raise ValueError(
            f"config.json: vision_config.window_size is {size}; want {side} or more, the pixels of a token"
        )
    return size // side


def _layers(config: Mapping[str, Any], name: str, depth: int) -> tuple[int, ...]:
    value = config[name]
    fits = isinstance(value, list) and all(type(one) is int and 0 <= one < depth for one in value)
    if not fits or value != sorted(set(value)):
        said = f"config.json: vision_config.{name} is {value!r}"
        raise ValueError(f"{said}; want numbers of its {depth} layers, each once and in order")
    return tuple(value)
