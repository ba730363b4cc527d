"""What config.json says of the vision tower of Gemma 4, and of what makes rows of its patches."""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import flag, number, positive
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_fields import check_agrees, check_only, of_text, sizes_of, theta_of, vision_fields
from tercet.model.vision_pixels import Normalisation, normalisation

_DEFAULTS = {
    "model_type": "gemma4_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "rope_theta": 100.0,
}
_ONLY = {
    "model_type": ("gemma4_vision",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
}
_TEXT_SIZE = 2304
"""The language model's, where config.json is silent."""
_AS_THEY_ARE: Normalisation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def gemma4_vision(raw: Mapping[str, Any], images: Mapping[str, Any]) -> VisionConfig | None:
    """From the whole config.json and the settings of images; None where there is no tower. ValueError names the field
    that is missing, wrong or not supported."""
    if not raw.get("vision_config"):
        return None
    config = vision_fields(raw, _DEFAULTS)
    check_only(config, _ONLY, "vision_config.")
    sizes, patch, merge = sizes_of(config, of_text(raw), _TEXT_SIZE), *_sides(config)
    heads, size = sizes["num_heads"], sizes["hidden_size"] // sizes["num_heads"]
    for name, wanted in (("num_key_value_heads", heads), ("head_dim", size)):
        if config[name] != wanted:
            raise ValueError(f"config.json: vision_config.{name} is {config[name]!r}; supported: {wanted}")
    check_agrees(images, patch_size=patch, pooling_kernel_size=merge)
    most, positions = positive(images, "max_soft_tokens", 280), positive(config, "position_embedding_size")
    if most * merge > positions:
        said = f"position_embedding_size is {positions}"
        raise ValueError(f"config.json: vision_config.{said}; want {most * merge} or more for images of {most} tokens")
    eps = number(config, "rms_norm_eps", 1e-6)
    mean, deviation = _normalisation(images)
    return VisionConfig(
        **sizes,
        patch=patch,
        merge=merge,
        activation="gelu",
        eps=eps,
        out_eps=eps,
        rms_norms=True,
        patch_bias=False,
        qkv_bias=False,
        out_bias=False,
        names="gemma4",
        theta=theta_of(config),
        shared_angles=True,
        axis_positions=positions,
        head_norms=True,
        clipped=flag(config, "use_clipped_linears"),
        standardized=flag(config, "standardize"),
        both_ways=of_text(raw).get("use_bidirectional_attention") == "vision",
        in_windows=True,
        most_tokens=most,
        mean=mean,
        deviation=deviation,
    )


def _sides(config: Mapping[str, Any]) -> tuple[int, int]:
    """Of a patch in pixels, of a token in patches."""
    return positive(config, "patch_size"), positive(config, "pooling_kernel_size")


def _normalisation(images: Mapping[str, Any]) -> Normalisation:
    """The processor usually leaves pixels from 0 to 1, and the tower begins with making them -1 to 1."""
    given = {**images, "do_normalize": True}
    if not images.get("do_normalize"):
        given |= {"image_mean": None, "image_std": None}
    mean, deviation = normalisation(given, _AS_THEY_ARE)
    shifted = tuple(shift + size / 2 for shift, size in zip(mean, deviation, strict=True))
    return shifted, tuple(size / 2 for size in deviation)
