"""From a checkpoint's json files to its vision encoder's settings, if it has one that is known."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.model.gemma4_vision import gemma4_vision
from tercet.model.glm_vision import glm_vision
from tercet.model.internvl_vision import internvl_vision
from tercet.model.pixtral_vision import pixtral_vision
from tercet.model.qwen_vision import qwen_vision
from tercet.model.siglip_vision import siglip_vision
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_kinds import KINDS
from tercet.model.vision_pixels import image_settings

_READERS = {
    "gemma3": siglip_vision,
    "gemma4": gemma4_vision,
    "glm4v": glm_vision,
    "glm46v": glm_vision,
    "glm4v_moe": glm_vision,
    "internvl": internvl_vision,
    "mistral3": pixtral_vision,
}
"""By the model_type of the whole checkpoint; those of Qwen's families are `KINDS`."""


def read_vision_config(folder: Path, raw: Mapping[str, Any]) -> VisionConfig | None:
    """The encoder of a checkpoint with this config.json; None if it has none that is known. ValueError names the field
    that is missing, wrong or not supported."""
    model_type = str(raw.get("model_type"))
    if (read := _READERS.get(model_type)) is not None:
        return read(raw, image_settings(folder))
    if (kind := KINDS.get(model_type)) is not None:
        return qwen_vision(raw, kind, image_settings(folder))
    return None
