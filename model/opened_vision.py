"""What sees images in a checkpoint, of which all is known but its weights' numbers."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from tercet.model.config_json import read_config_json
from tercet.model.safetensors_files import SafetensorsCheckpoint
from tercet.model.text_part import has_text_part
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_reader import read_vision_config
from tercet.model.weights import Files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedVision:
    """Of one checkpoint."""

    config: VisionConfig
    files: Files | None
    """All of its tensors; None: its numbers are random ones, of this seed."""
    seed: int


def open_vision(path: Path, device: torch.device, dummy_seed: int | None, *, wanted: bool) -> OpenedVision | None:
    """What sees in this model, if anything does, and is `wanted` and known. ValueError as of `read_vision_config`."""
    if path.suffix == ".gguf" or not has_text_part(raw := read_config_json(path)):
        return None
    try:
        config = read_vision_config(path, raw) if wanted else None
    except ValueError as error:
        raise ValueError(f"{error}; --limit-mm-per-prompt '{{\"image\": 0}}' serves text alone") from None
    if config is None:
        (architecture,) = raw["architectures"]
        log.warning("of %s only the language model is served; what looks at images is left out", architecture)
        return None
    files = SafetensorsCheckpoint(path, pinned=device.type == "cuda") if dummy_seed is None else None
    return OpenedVision(config, files, dummy_seed or 0)
