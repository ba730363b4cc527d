"""The weights of a tiny checkpoint on the CPU."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from tercet.model.checkpoint import open_model
from tercet.model.shard import ExpertWeights, LayerWeights, MlpWeights, Weights
from tercet.model.weights import load_weights

CPU = torch.device("cpu")


def load(
    path: Path, rank: int = 0, size: int = 1, *, dtype: torch.dtype = torch.float32, fused: bool = False
) -> Weights:
    config, tensors = open_model(path)
    return load_weights(tensors, config, rank=rank, size=size, dtype=dtype, device=CPU, interleaved=fused)


def tensors_of(part: LayerWeights | MlpWeights | ExpertWeights) -> Iterator[Tensor]:
    """All that are there."""
    for field in fields(part):
        match getattr(part, field.name):
            case Tensor() as tensor:
                yield tensor
            case MlpWeights() | ExpertWeights() as block:
                yield from tensors_of(block)


def weight_list(weights: Weights) -> list[Tensor]:
    """All of a rank's."""
    layers = [tensor for layer in weights.layers for tensor in tensors_of(layer)]
    return [weights.embedding_VD, weights.final_norm_D, weights.lm_head_VD, *layers]
