"""Which products of a model round rows to eight bits where there are many, so that the matrix units take both sides so.

Those of attention and of MLPs, experts' too, whose weights are kept in FP8 with scales of blocks of 128 rows or of
whole rows.
Knows a rank's weights; how many rows are many is `choose_fp8.py`'s matter.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from tercet.model.rank_weights import ExpertWeights, GuesserWeights, LayerWeights, MlpWeights, Weights
from tercet.model.scaled_rows import Kept
from tercet.triton_kernels.dispatch import gpu_of, is_hopper
from tercet.triton_kernels.scaled_weight import ScaledWeight, with_tile_scales

W = TypeVar("W")


def check_rounding(kept: Kept, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError where no product could: known before weights are read. `kept`: which are as stored."""
    if not is_hopper(device):
        gpu = gpu_of(device)
        got = "the CPU" if gpu is None else gpu.in_words
        raise ValueError(f"--activation-dtype got 'fp8' for {got}; want a GPU of 9.0, or auto")
    if dtype.itemsize != 2:
        raise ValueError("--activation-dtype got 'fp8' for a model in float32; want --dtype bfloat16 or float16")
    if not any(way.bits == 8 for way in kept.values()):
        raise ValueError("--activation-dtype got 'fp8', and none of this model's weights are kept in FP8; want auto")


def with_rounded_rows(weights: Weights) -> Weights:
    """The same with `tile_scales` where there are such. ValueError: nowhere."""
    layers = tuple(_of_layer(layer) for layer in weights.layers)
    if not any(_rounds(weight) for layer in layers for weight in _products(layer)):
        raise ValueError(
            "--activation-dtype got 'fp8', and no layer's weights in FP8 have scales of blocks of 128 rows and 128 "
            "columns, or of rows; want auto"
        )
    guesser = weights.guesser
    if isinstance(guesser, GuesserWeights):
        guesser = replace(guesser, layer=_of_layer(guesser.layer))
    return replace(weights, layers=layers, guesser=guesser)


def _of_layer(layer: LayerWeights) -> LayerWeights:
    mlp = layer.mlp
    if isinstance(mlp, MlpWeights):
        mlp = replace(mlp, gate_up_2FD=_rounding(mlp.gate_up_2FD), down_DF=_rounding(mlp.down_DF))
    elif mlp is not None:
        mlp = _of_experts(mlp)
    beside = layer.beside and replace(layer.beside, experts=_of_experts(layer.beside.experts))
    return replace(layer, qkv_ND=_rounding(layer.qkv_ND), o_DQ=_rounding(layer.o_DQ), mlp=mlp, beside=beside)


def _of_experts(experts: ExpertWeights) -> ExpertWeights:
    return replace(experts, gate_up_E2FD=_rounding(experts.gate_up_E2FD), down_EDF=_rounding(experts.down_EDF))


def _products(layer: LayerWeights) -> Iterator[object]:
    yield from (layer.qkv_ND, layer.o_DQ)
    for part in (layer.mlp, layer.beside and layer.beside.experts):
        match part:
            case MlpWeights():
                yield from (part.gate_up_2FD, part.down_DF)
            case ExpertWeights():
                yield from (part.gate_up_E2FD, part.down_EDF)


def _rounding(weight: W) -> W | ScaledWeight:
    return with_tile_scales(weight) if isinstance(weight, ScaledWeight) else weight


def _rounds(weight: object) -> bool:
    return isinstance(weight, ScaledWeight) and weight.tile_scales is not None
