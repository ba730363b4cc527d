"""Quantized checkpoints of models whose cache has latents: which matrices are kept as stored, and that they stand for
the numbers of plain ones, on every rank.

What reads the stream has rows for queries, of a rank's heads or of all, and for latents: kept if all are stored alike.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import make_checkpoint, random_prompts
from loaded_weights import CPU, check_same, load, matrices
from paged_sequences import Sequences, make_decoder
from quantized_checkpoints import QUANTIZED, Way, awq, change, fp8, gptq, packed, quantized
from tercet.model import load as load_module
from tercet.model.checkpoint import parse_settings
from tercet.model.dummy import DummyCheckpoint
from tercet.model.load import open_for
from tercet.model.weights import load_weights
from tercet.triton_kernels.dispatch import Gpu, pretending
from tercet.triton_kernels.scaled_weight import ScaledWeight
from test_model_quantized import AWQ, FP8, GPTQ, compressed

META = torch.device("meta")
RANKS = [(0, 1), (0, 2), (1, 2)]
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
}
DEEPSEEK = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
GLM: dict[str, Any] = {
    **SIZES,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "mlp_layer_types": ["dense", "sparse"],
    "n_routed_experts": 3,
    "num_experts_per_tok": 1,
}
"""Latents and heads of their real size: 576 rows for latents and what turns are four blocks and a half, and those of
a head's own matrices are three and a half."""
BLOCKS = Way({**FP8, "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, fp8(128, 128))
PACKED = Way(compressed("pack-quantized", num_bits=4, strategy="group", group_size=64), packed(4, 64, False))
ALL = "qkv query o gate_up down"


def but(*names: str) -> Callable[[str], bool]:
    return lambda name: not any(part in name for part in names)


def experts_alone(name: str) -> bool:
    return ".experts." in name


@dataclass(frozen=True)
class Case:
    """`kept`: in each layer, on one rank. `wanted`: what is quantized."""

    family: str
    way: Way
    kept: tuple[str, str] = (ALL, ALL)
    sizes: Any = None
    dtype: torch.dtype = torch.float16
    wanted: Callable[[str], bool] = lambda name: True


CASES = {
    "FP8 of DeepSeek": Case("deepseek-v3", BLOCKS, sizes=DEEPSEEK, dtype=torch.bfloat16),
    "FP8 of GLM": Case("glm4-moe-lite", BLOCKS, sizes=GLM, dtype=torch.bfloat16),
    "latents plain": Case("youtu", BLOCKS, ("query o gate_up down",) * 2, wanted=but("kv_a_proj")),
    "queries' plain": Case("youtu", BLOCKS, ("query o gate_up down",) * 2, wanted=but("q_a_proj")),
    "queries plain": Case("youtu", BLOCKS, ("qkv o gate_up down",) * 2, wanted=but("q_b_proj")),
    "attention plain": Case("youtu", BLOCKS, ("gate_up down",) * 2, wanted=but("self_attn")),
    "queries at once": Case(
        "deepseek-v2", BLOCKS, ("qkv o gate_up down",) * 2, sizes={**DEEPSEEK, "q_lora_rank": None}
    ),
    "experts alone": Case(
        "deepseek-v3", PACKED, ("", ""), sizes={**DEEPSEEK, "n_shared_experts": 1}, wanted=experts_alone
    ),
    "AWQ": Case("youtu", Way({**AWQ, "group_size": 64}, awq(64))),
    "AWQ of all but heads": Case("youtu", Way({**AWQ, "group_size": 64}, awq(64)), wanted=but("kv_b_proj")),
    "GPTQ": Case(
        "glm4-moe-lite", Way({**GPTQ, "bits": 4, "group_size": 128, "desc_act": False}, gptq(4, 128, 1)), sizes=GLM
    ),
    "packed": Case("youtu", PACKED),
}


@pytest.mark.parametrize("name", CASES)
def test_they_stand_for_the_numbers_of_plain_ones(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    sizes = {**SIZES, **(case.sizes or {})}
    model = make_checkpoint(case.family, tmp_path / "model", seed=random.randrange(2**32), **sizes)
    stored, meant = quantized(model, case.way, tmp_path, wanted=case.wanted)
    for number, (rank, size) in enumerate(RANKS):
        options: dict[str, Any] = {"dtype": case.dtype, "fused": number % 2 == 1}
        kept, plain = load(stored, rank, size, kept=True, **options), load(meant, rank, size, **options)
        check_same(kept, plain)
        check_same(load(stored, rank, size, **options), plain)
        for index, wanted in enumerate(case.kept):
            found = {kind for kind, matrix in matrices(kept, index).items() if isinstance(matrix, ScaledWeight)}
            assert found == set(wanted.split()), (index, rank, size)
            assert kept.layers[index].latent is not None
            assert isinstance(kept.layers[index].latent.up_HXL, torch.Tensor)


@pytest.mark.parametrize("name", ["FP8 of GLM", "AWQ", "latents plain"])
def test_logits_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = make_checkpoint(case.family, tmp_path / "model", **{**SIZES, **(case.sizes or {})})
    a, b = random_prompts(2, 20, 30, seed=7)
    stored, meant = (
        [run.step({}, {0: a[:-1], 1: b[:9]}), run.step({0: a[-1]}, {1: b[9:]})]
        for run in (
            Sequences(make_decoder(path), 2) for path in quantized(model, case.way, tmp_path, wanted=case.wanted)
        )
    )
    for ours, wanted in zip(stored, meant, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_matrices_of_heads_are_said_to_be_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And do not count where it is asked whether the others are large enough."""
    model = make_checkpoint("youtu", tmp_path / "model", **{**SIZES, "qk_nope_head_dim": 1024})
    stored, _ = quantized(model, BLOCKS, tmp_path)
    names = {name for name in load_file(model / "model.safetensors") if name.endswith(QUANTIZED)}
    of_heads = {name for name in names if "kv_b_proj" in name}
    sizes = [t.numel() for name, t in load_file(model / "model.safetensors").items() if name in names - of_heads]
    with pretending(Gpu("NVIDIA H200", 90, 132)):
        for least, kept in ((sum(sizes) // len(sizes), names - of_heads), (sum(sizes) // len(sizes) + 1, set())):
            monkeypatch.setattr(load_module, "_LEAST_NUMBERS", least)
            opened = open_for(stored, META, dtype="bfloat16")
            assert opened.kept.keys() == kept
            assert opened.num_expanded == len(names - kept)


def test_a_layer_for_guesses_is_left_out(tmp_path: Path) -> None:
    """With all of its scales, as the model's own last layer has them, and what only it has."""
    sizes = {**SIZES, **DEEPSEEK, "num_nextn_predict_layers": 1}
    stored, _ = quantized(make_checkpoint("deepseek-v3", tmp_path / "model", **sizes), BLOCKS, tmp_path)
    wanted = load(stored)
    tensors = load_file(stored / "model.safetensors")
    behind = {name.replace(".1.", ".2.", 1): one for name, one in tensors.items() if name.startswith("model.layers.1.")}
    assert any(name.endswith("with_mqa.weight_scale_inv") for name in behind)
    change(stored, {**behind, "model.layers.2.eh_proj.weight": torch.ones(256, 512)})
    check_same(load(stored), wanted)


@pytest.mark.parametrize("way", [BLOCKS, Way({**AWQ, "group_size": 64}, awq(64))])
def test_dummies(way: Way, tmp_path: Path) -> None:
    """Have the same matrices quantized, and the same numbers on all ranks and where nothing is kept."""
    model = make_checkpoint("youtu", tmp_path, **SIZES)
    raw = json.loads((model / "config.json").read_text())
    config, quantization = parse_settings({**raw, "quantization_config": way.settings})
    dummy = DummyCheckpoint(config, 7, torch.bfloat16, CPU, quantization)
    assert dummy.quantized() == {name for name in load_file(model / "model.safetensors") if name.endswith(QUANTIZED)}
    for rank, size in RANKS:
        options: dict[str, Any] = {"rank": rank, "size": size, "dtype": torch.bfloat16, "device": CPU}
        kept = load_weights(dummy, config, kept=dummy.stored_as(), **options)
        check_same(kept, load_weights(dummy, config, **options))
        for index in range(config.num_layers):
            assert all(isinstance(matrix, ScaledWeight) for matrix in matrices(kept, index).values())
