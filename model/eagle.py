"""A checkpoint whose one layer guesses tokens for another model (EAGLE-3): from its folder to one rank's weights."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tercet.model.config import ModelConfig
from tercet.model.config_json import read_config_json
from tercet.model.dummy import DummyCheckpoint
from tercet.model.eagle_config import EagleConfig, parse_eagle
from tercet.model.eagle_shard import OFFSETS, UNREAD, EagleShard
from tercet.model.quantization import quantization_of
from tercet.model.rank_weights import EagleWeights
from tercet.model.safetensors_files import PLAIN, SafetensorsCheckpoint
from tercet.model.weights import Checkpoint, carry_out, check_names, misfit


@dataclass(frozen=True)
class OpenedEagle:
    """All that is known but its weights' numbers."""

    config: EagleConfig
    tensors: Checkpoint


def open_eagle(
    folder: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device, dummy_seed: int | None = None
) -> OpenedEagle:
    """For this model. `dummy_seed`: random weights, and only a config.json is needed. ValueError names what is wrong
    with it, or does not fit the model."""
    try:
        raw = read_config_json(folder)
        if quantization_of(raw) is not None:
            raise ValueError("config.json: quantization_config is not supported for eagle3; want plain weights")
        config = parse_eagle(raw, model)
        if dummy_seed is not None:
            return OpenedEagle(config, DummyCheckpoint(_shapes(config), dummy_seed, dtype, device))
        files = SafetensorsCheckpoint(folder, pinned=device.type == "cuda")
        _check_plain(files)
        return OpenedEagle(config, files)
    except ValueError as error:
        raise ValueError(f"--speculative-config: model {folder}: {error}") from None


def load_eagle(
    opened: OpenedEagle, *, rank: int, size: int, dtype: torch.dtype, device: torch.device, interleaved: bool
) -> EagleWeights:
    """One rank's part. ValueError names tensors that are missing, surplus or misshapen."""
    found = {name: shape for name, shape in opened.tensors.shapes().items() if name not in UNREAD}
    check_names(opened.tensors.source, _shapes(opened.config, found), found)
    shard = EagleShard(opened.config, found.keys(), rank, size, dtype, device, interleaved=interleaved)
    carry_out(shard.moves, opened.tensors)
    return shard.filled()


def _check_plain(files: SafetensorsCheckpoint) -> None:
    for name in files.shapes().keys() - UNREAD:
        dtype, whole = files.dtype_of(name), name == OFFSETS
        if (dtype in (torch.int64, torch.int32)) != whole or not (whole or dtype in PLAIN):
            raise misfit(files, name, "whole numbers" if whole else "plain numbers")


def _shapes(config: EagleConfig, names: dict[str, tuple[int, ...]] | None = None) -> dict[str, tuple[int, ...]]:
    """Every tensor that such a checkpoint has that calls its tensors so."""
    shard = EagleShard(config, names or {}, 0, 1, torch.float32, torch.device("meta"), interleaved=False)
    return {move.name: move.shape for move in shard.moves}
