"""Which models and cards may round rows to eight bits, and that others are refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints import checkpoint
from tercet.engine.config import EngineConfig
from tercet.model.checkpoint import read_config
from tercet.model.rank_weights import MlpWeights
from tercet.model.rounded_rows import check_rounding, with_rounded_rows
from tercet.model.scaled_rows import StoredAs
from tercet.model.shard import LAYERS
from tercet.model.weights import empty_weights
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from tercet.triton_kernels.scaled_weight import ScaledWeight

META = torch.device("meta")
FP8, FOUR = StoredAs(8, 128, torch.float32), StoredAs(4, 128, torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "dtype", "kept", "wanted"),
    [
        (89, torch.bfloat16, FP8, "for NVIDIA X of compute capability 8.9; want a GPU of 9.0, or auto"),
        (90, torch.float32, FP8, "for a model in float32; want --dtype bfloat16 or float16"),
        (90, torch.bfloat16, FOUR, "none of this model's weights are kept in FP8; want auto"),
    ],
)
def test_refused(capability: int, dtype: torch.dtype, kept: StoredAs, wanted: str) -> None:
    with pretending(Gpu("NVIDIA X", capability, 132)), pytest.raises(ValueError, match=wanted):
        check_rounding({"model.layers.0.self_attn.q_proj.weight": kept}, dtype, META)


def test_not_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="--activation-dtype got 'fp8' for the CPU; want a GPU of 9"):
        check_rounding({"w": FP8}, torch.bfloat16, torch.device("cpu"))


def test_not_with_deterministic() -> None:
    with pytest.raises(ValueError, match="--activation-dtype got 'fp8' with --deterministic; want auto"):
        EngineConfig(model="m", activation_dtype="fp8", deterministic=True)
    with pytest.raises(ValueError, match="--activation-dtype got 'int8'; want one of auto, fp8"):
        EngineConfig(model="m", activation_dtype="int8")  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="means a card that is not there")
def test_products_of_each_layer() -> None:
    config = replace(read_config(checkpoint("qwen3")), hidden_size=256, intermediate_size=512, head_dim=64)
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    every = [f"{LAYERS}{layer}.{name}.weight" for layer in range(config.num_layers) for name in names]
    on_rank: dict[str, Any] = {"rank": 0, "size": 1, "dtype": torch.bfloat16, "device": META, "interleaved": True}
    with pretending(Gpu("NVIDIA H200", 90, 132)):
        kept = dict.fromkeys(every, FP8)
        for layer in with_rounded_rows(empty_weights(config, kept=kept, **on_rank)).layers:
            assert isinstance(layer.mlp, MlpWeights)
            for weight in (layer.qkv_ND, layer.o_DQ, layer.mlp.gate_up_2FD, layer.mlp.down_DF):
                assert isinstance(weight, ScaledWeight)
                assert weight.tile_scales is not None
        small = dict.fromkeys(every, StoredAs(8, 64, torch.float32))
        with pytest.raises(ValueError, match="no layer's weights in FP8 have scales of blocks of 128 rows and 128"):
            with_rounded_rows(empty_weights(config, kept=small, **on_rank))
