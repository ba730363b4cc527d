"""From a model's path to its ModelConfig and its tensors, whatever the format."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.config_nemotron import blocks
from tercet.model.expanded_checkpoint import ExpandedCheckpoint
from tercet.model.gguf_file import GgufCheckpoint
from tercet.model.quantization import Quantization, quantization_of, without_quantization
from tercet.model.renamed import is_bare, with_base
from tercet.model.safetensors_files import SafetensorsCheckpoint
from tercet.model.shard import EMBEDDING, LM_HEAD
from tercet.model.split_rows import granite_hybrid, nemotron_hybrid
from tercet.model.stacked_experts import StackedExperts, how_they_lie, is_stacked
from tercet.model.text_part import has_text_part, text_part_of, text_tensors
from tercet.model.weights import Checkpoint, Files

_CPU = torch.device("cpu")


def read_config(path: Path) -> ModelConfig:
    """The ModelConfig of a model folder or a .gguf file; ValueError names what is wrong or not supported."""
    config, _ = read_settings(path)
    return config


def read_settings(path: Path) -> tuple[ModelConfig, Quantization | None]:
    """The same, and how a folder's weights are quantized."""
    return (GgufCheckpoint(path).config, None) if path.suffix == ".gguf" else parse_settings(read_config_json(path))


def parse_settings(raw: Mapping[str, Any]) -> tuple[ModelConfig, Quantization | None]:
    """The same of a config.json."""
    quantization, plain = quantization_of(raw), without_quantization(raw)
    config = parse_config(text_part_of(plain) if has_text_part(plain) else plain)
    if quantization is not None and config.family == "granitemoehybrid":
        said = f"quantization_config.quant_method is {quantization.method!r}"
        raise ValueError(f"config.json: {said}; supported for {config.family}: none")
    if quantization is not None and (quantization.way == "mxfp4") != has_stacked_experts(config):
        supported = "all but mxfp4" if quantization.way == "mxfp4" else "mxfp4"
        said = f"quantization_config.quant_method is {quantization.method!r}"
        raise ValueError(f"config.json: {said}; supported for {config.family}: {supported}")
    return config, quantization


def has_stacked_experts(config: ModelConfig) -> bool:
    """Whether a checkpoint always has the matrices of all experts of a layer in one tensor."""
    return config.experts is not None and bool(config.experts.names.gate_up)


def open_model(path: Path, device: torch.device = _CPU) -> tuple[ModelConfig, Checkpoint]:
    """ModelConfig and tensors of a model folder or a .gguf file, to go to this device.

    Where config.json names no type, the checkpoint's own is its embedding's.
    """
    if path.suffix == ".gguf":
        file = GgufCheckpoint(path)
        return file.config, file
    raw = read_config_json(path)
    config, quantization = parse_settings(raw)
    whole = SafetensorsCheckpoint(path, pinned=device.type == "cuda")
    if quantization is None:
        whole.check_plain()
    tensors: Files = text_tensors(whole, raw) if has_text_part(raw) else with_base(whole)
    if config.family == "granitemoehybrid":
        tensors = granite_hybrid(tensors, has_experts=config.experts is not None)
    if config.family == "nemotron_h":
        tensors = nemotron_hybrid(tensors, blocks(raw))
    if LM_HEAD in whole.shapes() and config.classifier is None:
        config = replace(config, generates=True)
    elif is_bare(whole) and not config.tie_word_embeddings:  # saved without a head, whatever architecture it names
        config = replace(config, tie_word_embeddings=True, generates=False)
    if config.dtype is None:
        config = replace(config, dtype=tensors.dtype_of(EMBEDDING))
    if has_stacked_experts(config):
        return config, StackedExperts(tensors, device, "in turns")
    if quantization is None and config.experts is not None and any(map(is_stacked, tensors.shapes())):
        return config, StackedExperts(tensors, device, how_they_lie(tensors.shapes(), config.hidden_size))
    return config, tensors if quantization is None else ExpandedCheckpoint(tensors, quantization, device)
