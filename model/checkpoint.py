"""From a model's path to its ModelConfig and its tensors, whatever the format."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.gguf_file import GgufCheckpoint
from tercet.model.safetensors_files import SafetensorsCheckpoint
from tercet.model.shard import EMBEDDING
from tercet.model.text_part import TextPart, has_text_part, text_part_of
from tercet.model.weights import Checkpoint


def read_config(path: Path) -> ModelConfig:
    """The ModelConfig of a model folder or a .gguf file; ValueError names what is wrong or not supported."""
    if path.suffix == ".gguf":
        return GgufCheckpoint(path).config
    return _config_of(read_config_json(path))


def open_model(path: Path, *, pinned: bool = False) -> tuple[ModelConfig, Checkpoint]:
    """ModelConfig and tensors of a model folder or a .gguf file. `pinned`: they are to go to a GPU.

    Where config.json names no type, the checkpoint's own is its embedding's.
    """
    if path.suffix == ".gguf":
        file = GgufCheckpoint(path)
        return file.config, file
    raw = read_config_json(path)
    config, whole = _config_of(raw), SafetensorsCheckpoint(path, pinned=pinned)
    tensors = TextPart(whole) if has_text_part(raw) else whole
    if config.dtype is None:
        config = replace(config, dtype=tensors.dtype_of(EMBEDDING))
    return config, tensors


def _config_of(raw: Mapping[str, Any]) -> ModelConfig:
    return parse_config(text_part_of(raw) if has_text_part(raw) else raw)
