"""Quantized checkpoints of models whose layers carry states: what is kept as stored, beside what files have plain."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint, random_prompts
from loaded_weights import load
from paged_sequences import Sequences, make_decoder
from quantized_checkpoints import Way, fp8, quantized
from tercet.model.checkpoint import parse_settings
from tercet.model.config_json import read_config_json
from tercet.model.dummy import DummyCheckpoint
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.widen import plain
from test_model_quantized import FP8

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 128,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
BLOCKS = Way({**FP8, "weight_block_size": [128, 128]}, fp8(128, 128))


def of_heads(name: str) -> bool:
    """All but what makes two numbers of each head, as Qwen's files have it."""
    return not name.endswith(("in_proj_b.weight", "in_proj_a.weight", "in_proj_ba.weight"))


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_rates_are_plain_and_all_else_is_kept(family: str, rank: int, size: int, tmp_path: Path) -> None:
    more = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256} if family == "qwen3-next" else {}
    model = make_checkpoint(family, tmp_path / "model", seed=random.randrange(2**32), **SIZES, **more)
    stored, meant = quantized(model, BLOCKS, tmp_path, wanted=of_heads)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "fused": True}
    kept, wanted = load(stored, rank, size, kept=True, **options), load(meant, rank, size, **options)
    for ours, theirs in zip(kept.layers, wanted.layers, strict=True):
        assert isinstance(ours.qkv_ND, ScaledWeight)
        assert isinstance(ours.o_DQ, ScaledWeight)
        assert isinstance(theirs.qkv_ND, torch.Tensor)
        matrix = plain(ours.qkv_ND)
        if ours.delta is not None:
            assert isinstance(ours.delta.rates_RD, torch.Tensor)
            matrix = torch.cat((matrix, ours.delta.rates_RD))
        assert torch.equal(matrix, theirs.qkv_ND)
    assert any(layer.delta is not None for layer in kept.layers)


def test_logits_are_those_of_the_numbers(tmp_path: Path) -> None:
    """Of those that were stored, and of dummies."""
    model = make_checkpoint("qwen3.5", tmp_path / "model", **SIZES)
    a, b = random_prompts(2, 20, 30, seed=7)
    stored, meant = (
        [run.step({}, {0: a[:-1], 1: b[:9]}), run.step({0: a[-1]}, {1: b[9:]})]
        for run in (Sequences(make_decoder(path), 2) for path in quantized(model, BLOCKS, tmp_path, wanted=of_heads))
    )
    for ours, wanted in zip(stored, meant, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_dummies_have_the_same_matrices_quantized(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3.5", tmp_path / "model", **SIZES)
    stored, _ = quantized(model, BLOCKS, tmp_path, wanted=of_heads)
    config, quantization = parse_settings(read_config_json(stored))
    dummy = DummyCheckpoint(config, 3, torch.bfloat16, torch.device("cpu"), quantization)
    names = {name.rpartition("linear_attn.")[2] for name in dummy.quantized() if "linear_attn" in name}
    assert names == {"in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"}
