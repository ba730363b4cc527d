"""Which products of a model round rows to eight bits where there are many, so that the matrix units take both sides so.

Those of attention and of MLPs, experts' too, whose weights are kept in FP8 with scales of blocks of 128 rows or of
whole rows.
Knows a rank's weights; how many rows are many is `choose_fp8.py`'s matter.
"""

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
        mlp = replace(mlp, gate_up_E2FD=_rounding(mlp.gate_up_E2FD), down_EDF=_rounding(mlp.down_EDF))
    return replace(layer, qkv_ND=_rounding(layer.qkv_ND), o_DQ=_rounding(layer.o_DQ), mlp=mlp)


def _products(layer: LayerWeights) -> tuple[object, ...]:
    match layer.mlp:
        case MlpWeights() as mlp:
            return layer.qkv_ND, layer.o_DQ, mlp.gate_up_2FD, mlp.down_DF
        case ExpertWeights() as experts:
            return layer.qkv_ND, layer.o_DQ, experts.gate_up_E2FD, experts.down_EDF
    return layer.qkv_ND, layer.o_DQ


def _rounding(weight: W) -> W | ScaledWeight:
    return with_tile_scales(weight) if isinstance(weight, ScaledWeight) else weight


def _rounds(weight: object) -> bool:
    return isinstance(weight, ScaledWeight) and weight.tile_scales is not None
