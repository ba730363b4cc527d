"""What config.json says of the vision tower of Gemma 3, which is SigLIP's, and of what makes rows of its patches."""

import math
from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import number, positive
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_fields import ACTIVATIONS, check_only, of_text, sizes_of, vision_fields
from tercet.model.vision_pixels import HALVES, normalisation

_DEFAULTS = {
    "model_type": "siglip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
_ONLY = {
    "model_type": ("siglip_vision_model",),
    "hidden_act": tuple(ACTIVATIONS),
    "num_channels": (3,),
}
_TEXT_SIZE = 2304
"""The language model's, where config.json is silent."""


def siglip_vision(raw: Mapping[str, Any], images: Mapping[str, Any]) -> VisionConfig:
    """From the whole config.json and the settings of images. ValueError names the field that is missing, wrong or not
    supported."""
    config = vision_fields(raw, _DEFAULTS)
    check_only(config, _ONLY, "vision_config.")
    patch = positive(config, "patch_size")
    mean, deviation = normalisation(images, HALVES)
    eps = number(config, "layer_norm_eps", 1e-6)
    size, tokens = positive(config, "image_size"), positive(raw, "mm_tokens_per_image", 256)
    patches, length = size // patch, math.isqrt(tokens)
    if size % patch or length**2 != tokens or patches % length:
        raise ValueError(
            f"config.json: images of {size} pixels a side with patches of {patch} become {tokens} tokens "
            "(mm_tokens_per_image); want a square of them, each of as many whole patches"
        )
    return VisionConfig(
        **sizes_of(config, of_text(raw), _TEXT_SIZE),
        patch=patch,
        merge=patches // length,
        activation=ACTIVATIONS[config["hidden_act"]],
        eps=eps,
        out_eps=eps,
        rms_norms=False,
        patch_bias=True,
        out_bias=False,
        names="siglip",
        positions=patches,
        length=length,
        both_ways=True,
        mean=mean,
        deviation=deviation,
    )
