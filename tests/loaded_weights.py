"""The weights of a tiny checkpoint on the CPU."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.model.checkpoint import open_model
from tercet.model.rank_weights import (
    BesideWeights,
    DeltaWeights,
    ExpertWeights,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    Weights,
)
from tercet.model.weights import ScaledCheckpoint, load_weights
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight
from tercet.triton_kernels.widen import plain

CPU = torch.device("cpu")


def load(
    path: Path,
    rank: int = 0,
    size: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    kept: bool = False,
) -> Weights:
    """`kept`: as stored, what may be."""
    config, tensors = open_model(path)
    ways = tensors.stored_as() if kept and isinstance(tensors, ScaledCheckpoint) else {}
    options: dict[str, Any] = {"dtype": dtype, "device": CPU, "kept": ways, "interleaved": fused}
    return load_weights(tensors, config, rank=rank, size=size, **options)


def tensors_of(
    part: LayerWeights | LatentWeights | DeltaWeights | MlpWeights | ExpertWeights | BesideWeights,
) -> Iterator[Weight]:
    """All that are there."""
    for field in fields(part):
        match getattr(part, field.name):
            case Tensor() | ScaledWeight() as tensor:
                yield tensor
            case LatentWeights() | DeltaWeights() | MlpWeights() | ExpertWeights() | BesideWeights() as block:
                yield from tensors_of(block)


def weight_list(weights: Weights) -> list[Weight]:
    """All of a rank's."""
    layers = [tensor for layer in weights.layers for tensor in tensors_of(layer)]
    return [weights.embedding_VD, weights.final_norm_D, weights.lm_head_VD, *layers]


def matrices(weights: Weights, index: int) -> dict[str, Weight]:
    """Those of a layer that may be kept as stored."""
    layer = weights.layers[index]
    match layer.mlp:
        case MlpWeights(gate_up_2FD=gate_up, down_DF=down) | ExpertWeights(gate_up_E2FD=gate_up, down_EDF=down):
            pass
    query = layer.latent.query_XQ if layer.latent is not None else None
    return {
        "qkv": layer.qkv_ND,
        **({"query": query} if query is not None else {}),
        "o": layer.o_DQ,
        "gate_up": gate_up,
        "down": down,
    }


def check_same(ours: Weights, theirs: Weights) -> None:
    """`theirs` are plain; ours stand for the same numbers."""
    for mine, meant in zip(weight_list(ours), weight_list(theirs), strict=True):
        assert isinstance(meant, Tensor)
        assert mine.dtype == meant.dtype
        assert isinstance(mine, ScaledWeight) or mine.shape == meant.shape
        assert torch.equal(plain(mine).view(-1, meant.shape[-1]), meant.view(-1, meant.shape[-1]))
