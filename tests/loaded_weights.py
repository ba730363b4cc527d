"""The weights of a tiny checkpoint on the CPU."""

from pathlib import Path

import torch

from tercet.model.checkpoint import open_model
from tercet.model.shard import Weights
from tercet.model.weights import load_weights

CPU = torch.device("cpu")


def load(
    path: Path, rank: int = 0, size: int = 1, *, dtype: torch.dtype = torch.float32, fused: bool = False
) -> Weights:
    config, tensors = open_model(path)
    return load_weights(tensors, config, rank=rank, size=size, dtype=dtype, device=CPU, interleaved=fused)
