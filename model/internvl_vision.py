"""What config.json says of InternViT, the vision tower of InternVL, and of what makes rows of its patches."""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import flag, number, positive
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_fields import ACTIVATIONS, check_only, of_square, of_text, sizes_of, vision_fields
from tercet.model.vision_pixels import CLIP, normalisation

_DEFAULTS = {
    "model_type": "internvl_vision",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "use_mean_pooling": True,
}
_ONLY = {
    "model_type": ("internvl_vision",),
    "hidden_act": tuple(ACTIVATIONS),
    "norm_type": ("layer_norm", "rms_norm"),
    "num_channels": (3,),
    "use_absolute_position_embeddings": (True,),
    "use_mask_token": (False,),
}
_ONLY_OF_WHOLE = {
    "projector_hidden_act": (None, "gelu"),
    "vision_feature_layer": (None, -1),
    "vision_feature_select_strategy": (None, "default"),
}
_OUT_EPS = 1e-5
_TEXT_SIZE = 4096
"""The language model's, where config.json is silent."""


def internvl_vision(raw: Mapping[str, Any], images: Mapping[str, Any]) -> VisionConfig:
    """From the whole config.json and the settings of images. ValueError names the field that is missing, wrong or not
    supported."""
    config = vision_fields(raw, _DEFAULTS)
    check_only(config, _ONLY, "vision_config.")
    check_only(raw, _ONLY_OF_WHOLE, "")
    mean, deviation = normalisation(images, CLIP)
    patch, merge, length = _sides(raw, config)
    return VisionConfig(
        **sizes_of(config, of_text(raw), _TEXT_SIZE),
        patch=patch,
        merge=merge,
        activation=ACTIVATIONS[config["hidden_act"]],
        eps=number(config, "layer_norm_eps", 1e-6),
        out_eps=_OUT_EPS,
        rms_norms=config["norm_type"] == "rms_norm",
        patch_bias=True,
        out_bias=True,
        names="internvl",
        positions=length * merge,
        window=length,
        length=length,
        mean=mean,
        deviation=deviation,
        tiles=True,
        qkv_bias=flag(config, "attention_bias"),
        qk_norms=flag(config, "use_qk_norm"),
        last_norm=not flag(config, "use_mean_pooling"),
    )


def _sides(raw: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of a patch in pixels, of a token in patches, of a tile in tokens."""
    size, patch = (positive({name: of_square(config[name])}, name) for name in ("image_size", "patch_size"))
    ratio, tokens = number(raw, "downsample_ratio", 0.5), positive(raw, "image_seq_length", 256)
    merge = max(1, round(1 / ratio))
    length = size // patch // merge
    if merge * ratio != 1 or length * merge * patch != size or length**2 != tokens:
        raise ValueError(
            f"config.json: tiles of {size} pixels a side with patches of {patch} and a downsample_ratio of {ratio} "
            f"become {tokens} tokens (image_seq_length); want a square of them, each of as many whole patches"
        )
    return patch, merge, length
