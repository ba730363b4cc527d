"""The weights of a tiny checkpoint on the CPU."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.model.checkpoint import open_model
from tercet.model.rank_weights import ExpertWeights, LayerWeights, MlpWeights, Weights
from tercet.model.weights import ScaledCheckpoint, load_weights
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight

CPU = torch.device("cpu")


def load(
    path: Path,
    rank: int = 0,
    size: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    in_fp8: bool = False,
) -> Weights:
    """`in_fp8`: what is stored so stays so."""
    config, tensors = open_model(path)
    kept = tensors.scale_groups() if in_fp8 and isinstance(tensors, ScaledCheckpoint) else {}
    options: dict[str, Any] = {"dtype": dtype, "device": CPU, "in_fp8": kept, "interleaved": fused}
    return load_weights(tensors, config, rank=rank, size=size, **options)


def tensors_of(part: LayerWeights | MlpWeights | ExpertWeights) -> Iterator[Weight]:
    """All that are there."""
    for field in fields(part):
        match getattr(part, field.name):
            case Tensor() | ScaledWeight() as tensor:
                yield tensor
            case MlpWeights() | ExpertWeights() as block:
                yield from tensors_of(block)


def weight_list(weights: Weights) -> list[Weight]:
    """All of a rank's."""
    layers = [tensor for layer in weights.layers for tensor in tensors_of(layer)]
    return [weights.embedding_VD, weights.final_norm_D, weights.lm_head_VD, *layers]
