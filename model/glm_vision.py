"""What config.json says of the vision encoder of GLM-4.1V and its kin, and of what makes rows of its patches."""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import flag, number, positive
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_fields import (
    check_agrees,
    check_only,
    heads_of,
    of_square,
    out_size_of,
    sections_of,
    theta_of,
    vision_fields,
)
from tercet.model.vision_pixels import CLIP, normalisation

_DEFAULTS = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "num_heads": 12,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
_ONLY: dict[str, tuple[Any, ...] | None] = {
    "in_channels": (3,),
    "hidden_act": ("silu", "swish"),
    # Other names that transformers takes for some sizes.
    **dict.fromkeys(("num_attention_heads", "num_hidden_layers", "head_dim"), ()),
}
_SECTIONS = (8, 12, 12)
_OUT_EPS = 1e-5


def glm_vision(raw: Mapping[str, Any], images: Mapping[str, Any]) -> VisionConfig:
    """From the whole config.json and the settings of images. ValueError names the field that is missing, wrong or not
    supported."""
    config = vision_fields(raw, _DEFAULTS)
    check_only(config, _ONLY, "vision_config.")
    hidden, out = positive(config, "hidden_size"), positive(config, "out_hidden_size")
    size, patch, frames = (
        positive({name: of_square(config[name])}, name) for name in ("image_size", "patch_size", "temporal_patch_size")
    )
    merge = positive(config, "spatial_merge_size")
    check_agrees(images, patch_size=patch, merge_size=merge, temporal_patch_size=frames)
    mean, deviation = normalisation(images, CLIP)
    return VisionConfig(
        num_layers=positive(config, "depth"),
        hidden_size=hidden,
        num_heads=heads_of(config, "num_heads", hidden),
        inner_size=out,  # intermediate_size is that of the MLP behind them
        out_size=out_size_of(raw, "out_hidden_size", out),
        out_inner_size=positive(config, "intermediate_size"),
        patch=patch,
        frames=frames,
        merge=merge,
        activation="silu",
        eps=number(config, "rms_norm_eps", 1e-5),
        out_eps=_OUT_EPS,
        rms_norms=True,
        patch_bias=True,
        qkv_bias=flag(config, "attention_bias"),
        out_bias=False,
        names="glm",
        theta=theta_of(config),
        shared_angles=True,
        positions=size // patch,
        cubic=True,
        sections=sections_of(raw, _SECTIONS, interleaved=False),
        mean=mean,
        deviation=deviation,
    )
