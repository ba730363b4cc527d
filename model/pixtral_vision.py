"""What config.json says of Pixtral's vision tower, as it is in Mistral 3, and of what makes rows of its patches."""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import flag, number, positive
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_fields import check_only, of_text, sizes_of, theta_of, vision_fields
from tercet.model.vision_pixels import CLIP, normalisation

_DEFAULTS = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_ONLY = {"model_type": ("pixtral",), "hidden_act": ("silu", "swish"), "num_channels": (3,)}
_ONLY_OF_WHOLE = {"vision_feature_layer": (None, -1, [-1]), "projector_hidden_act": (None, "gelu")}
_EPS = 1e-5
"""Of its layers' norms; behind them it is the language model's."""
_TEXT_SIZE, _TEXT_EPS = 4096, 1e-6
"""The language model's, where config.json is silent."""


def pixtral_vision(raw: Mapping[str, Any], images: Mapping[str, Any]) -> VisionConfig:
    """From the whole config.json and the settings of images. ValueError names the field that is missing, wrong or not
    supported."""
    config = vision_fields(raw, _DEFAULTS)
    check_only(config, _ONLY, "vision_config.")
    check_only(raw, _ONLY_OF_WHOLE, "")
    text = of_text(raw)
    sizes = sizes_of(config, text, _TEXT_SIZE)
    check_only(config, {"head_dim": (sizes["hidden_size"] // sizes["num_heads"],)}, "vision_config.")
    mean, deviation = normalisation(images, CLIP)
    return VisionConfig(
        **sizes,
        patch=positive(config, "patch_size"),
        merge=positive(raw, "spatial_merge_size", 2),
        activation="silu",
        eps=_EPS,
        out_eps=number(text, "rms_norm_eps", _TEXT_EPS),
        rms_norms=True,
        patch_bias=False,
        out_bias=flag(raw, "multimodal_projector_bias"),
        names="pixtral",
        theta=theta_of(config),
        breaks=True,
        mean=mean,
        deviation=deviation,
    )
