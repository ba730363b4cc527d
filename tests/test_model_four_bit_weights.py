"""Weights of four bits that are kept as stored: which ones are, and that they stand for the numbers of plain ones.

What is compared with comes from checkpoints of plain numbers, which know no bits (`quantized_checkpoints.py`).
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import make_checkpoint
from covering import long
from loaded_weights import CPU, check_same, load, matrices
from quantized_checkpoints import Way, awq, change, fp8, gptq, packed, quantized
from tercet.model import load as load_module
from tercet.model import quantized_matrices
from tercet.model.checkpoint import parse_settings
from tercet.model.dummy import DummyCheckpoint
from tercet.model.load import open_for
from tercet.model.rank_weights import Weights
from tercet.model.scaled_rows import StoredAs
from tercet.model.weights import load_weights
from tercet.triton_kernels.dispatch import Gpu, pretending
from tercet.triton_kernels.scaled_weight import ScaledWeight, check_weight
from tercet.triton_kernels.widen import plain
from test_model_quantized import AWQ, GPTQ, compressed

META = torch.device("meta")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
WIDE: dict[str, Any] = {**SIZES, "hidden_size": 384, "intermediate_size": 768, "head_dim": 96}
PHI3: dict[str, Any] = {**SIZES, "num_attention_heads": 16}
"""Heads of its own size, for which it has its positions' factors."""
LAYER = "model.layers.{}.{}_proj.{}".format


def of_gptq(bits: int, group: int, *, offset: int = 1, ordered: bool = False, **settings: Any) -> Way:
    version = {"checkpoint_format": "gptq"} if offset else {"format": "gptq_v2"}
    settings = {**GPTQ, "bits": bits, "group_size": group or -1, "desc_act": ordered, **version, **settings}
    return Way(settings, gptq(bits, group, offset, ordered))


def of_awq(group: int) -> Way:
    return Way({**AWQ, "group_size": group or -1}, awq(group))


def of_packed(bits: int, group: int, asymmetric: bool, **options: Any) -> Way:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return Way(compressed("pack-quantized", num_bits=bits, **strategy), packed(bits, group, asymmetric, **options))


@dataclass(frozen=True)
class Case:
    """What is kept on one rank, on each of two, and of four."""

    way: Way
    kept: tuple[str, str, str]
    family: str = "qwen3"
    sizes: Any = None
    dtype: torch.dtype = torch.float16


MOST = "qkv o gate_up down", "qkv gate_up down", "qkv gate_up down"
"""With 128 columns or 256 of o's in all, and 512 of down's."""
NONE = "", "", ""
SHARED = {"moe_intermediate_size": 512, "head_dim": 32}
CASES = {
    "gptq, 128": Case(of_gptq(4, 128), MOST),
    "gptq, version 2, 64": Case(of_gptq(4, 64, offset=0), MOST),
    "gptq, order in name only": Case(of_gptq(4, 64, desc_act=True), MOST),
    "gptq, order": Case(of_gptq(4, 64, ordered=True), NONE),
    "gptq, rows": Case(of_gptq(4, 0), MOST),
    "gptq, 8 bits": Case(of_gptq(8, 64), NONE),
    "gptq, 2 bits": Case(of_gptq(2, 64), NONE),
    "gptq, stacked": Case(of_gptq(4, 128), (MOST[0], MOST[0], MOST[1]), "phi3-short", PHI3),
    "awq, 128": Case(of_awq(128), MOST),
    "awq, bfloat16": Case(of_awq(128), MOST, dtype=torch.bfloat16),
    "awq, 64, stacked": Case(of_awq(64), (MOST[0], MOST[0], MOST[1]), "phi3-short", PHI3),
    "awq, 32": Case(of_awq(32), NONE),
    "awq, rows": Case(of_awq(0), MOST, "llama-bias-tied", {**SIZES, "head_dim": 32}),
    "awq, heads in pairs": Case(of_awq(0), ("qkv gate_up down",) * 3, "glm", SIZES),
    "awq, heads of odd size": Case(of_awq(0), ("qkv gate_up down",) * 3, "gemma3", SIZES),
    "awq, groups across blocks": Case(of_awq(192), (MOST[0], MOST[1], "qkv gate_up"), "qwen3", WIDE),
    "awq, 256": Case(of_awq(256), (MOST[0], MOST[0], "qkv gate_up"), "qwen3", {**SIZES, "head_dim": 64}),
    "awq, 96": Case(of_awq(96), NONE, "qwen3", WIDE),
    "awq, few columns": Case(of_awq(64), ("o down", "down", "down"), "qwen3", {**SIZES, "hidden_size": 192}),
    "packed, 64": Case(of_packed(4, 64, False), MOST),
    "packed, 128, zeros": Case(of_packed(4, 128, True), MOST),
    "packed, rows, zeros": Case(of_packed(4, 0, True), MOST),
    "packed, 32": Case(of_packed(4, 32, False), NONE),
    "packed, order": Case(of_packed(4, 64, True, ordered=True), NONE),
    "packed, bfloat16": Case(of_packed(4, 64, True, dtype=torch.bfloat16), MOST, dtype=torch.bfloat16),
    "packed, 8 bits": Case(of_packed(8, 64, True), NONE),
    "packed, experts": Case(of_packed(4, 128, True), MOST, "glm4-moe", {**SIZES, **SHARED}),
}


def kept_ones(weights: Weights, index: int) -> set[str]:
    return {kind for kind, matrix in matrices(weights, index).items() if isinstance(matrix, ScaledWeight)}


OTHERS = {
    *("gptq, version 2, 64", "gptq, order in name only", "gptq, 2 bits", "gptq, rows", "awq, 32", "awq, 96"),
    *("awq, bfloat16", "awq, 256", "packed, 64", "packed, rows, zeros", "packed, 8 bits", "gptq, stacked"),
}
"""For which others stand: what is stored so is read by the same code, in other sizes."""


@pytest.mark.parametrize("name", [long(name) if name in OTHERS else name for name in CASES])
def test_they_stand_for_the_numbers_of_plain_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, with gate and up rows in turns and not, and whatever the pieces in which they come."""
    case = CASES[name]
    sizes = SIZES if case.sizes is None else case.sizes
    model = make_checkpoint(case.family, tmp_path / "model", seed=random.randrange(2**32), **sizes)
    stored, meant = quantized(model, case.way, tmp_path)
    ranks = [(0, 1), (0, 2), (1, 2), (3, 4)]
    least = 1 if [*CASES].index(name) % 4 == 0 else 700  # of one row or of a few
    for number, (rank, size) in enumerate(ranks if any(case.kept) else ranks[1:2]):
        dtype, fused = case.dtype, number % 3 == 1
        monkeypatch.setattr(quantized_matrices, "_PIECE_NUMBERS", (2**22, 3000, 40000, least)[number])
        kept = load(stored, rank, size, dtype=dtype, fused=fused, kept=True)
        check_same(kept, load(meant, rank, size, dtype=dtype, fused=fused))
        check_same(kept, load(stored, rank, size, dtype=dtype, fused=fused))
        for index in range(len(kept.layers)):
            found = matrices(kept, index)
            assert kept_ones(kept, index) == found.keys() & case.kept[size // 2].split()
            for matrix in found.values():
                if isinstance(matrix, ScaledWeight):
                    K = matrix.shape[1]
                    check_weight("w", matrix, torch.empty(1, K, dtype=dtype), None, K)  # as products do
                    assert matrix.numbers_NJ.dtype == torch.uint8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SIZES)


def test_columns_in_order_need_no_index(model: Path, tmp_path: Path) -> None:
    """Nor does one that says just that do harm, unless it says it of other groups."""
    stored, _ = quantized(model, of_gptq(4, 128), tmp_path / "gptq")
    without = {name: None for name in load_file(stored / "model.safetensors") if name.endswith("g_idx")}
    up, down = (torch.arange(columns, dtype=torch.int32) // 64 % 2 for columns in (256, 512))
    change(stored, {**without, LAYER(0, "mlp.up", "g_idx"): up, LAYER(1, "mlp.down", "g_idx"): down})
    kept = load(stored, kept=True, dtype=torch.float16)
    check_same(kept, load(stored, dtype=torch.float16))
    assert [kept_ones(kept, index) for index in range(2)] == [{"qkv", "o", "down"}, {"qkv", "o", "gate_up"}]
    stored, meant = quantized(model, of_packed(4, 128, True), tmp_path / "packed")
    change(stored, {LAYER(0, "mlp.up", "weight_g_idx"): torch.arange(256, dtype=torch.int32) // 128})
    kept = load(stored, kept=True, dtype=torch.float16)
    check_same(kept, load(meant, dtype=torch.float16))
    assert len(kept_ones(kept, 0)) == 4


def several_kinds(model: Path, folder: Path) -> Path:
    """A stack of four bits and plain numbers, one of four bits and FP8, one of two groups, and o of FP8."""
    stored, _ = quantized(model, of_packed(4, 64, True), folder)
    tensors = load_file(model / "model.safetensors")
    changes, rng = dict[str, Tensor | None](), np.random.default_rng(0)
    for layer, name, way in [
        (0, "self_attn.k", None),
        (0, "mlp.gate", fp8(1, 64, "weight_scale")),
        (1, "mlp.up", packed(4, 128, True)),
        (1, "self_attn.o", fp8(1, 64, "weight_scale")),
    ]:
        old = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        changes |= {LAYER(layer, name, part): None for part in old}
        weight = tensors[LAYER(layer, name, "weight")].float()
        parts = {"weight": weight} if way is None else way(weight, rng)[0]
        changes |= {LAYER(layer, name, part): tensor for part, tensor in parts.items()}
    change(stored, changes)
    return stored


def test_a_matrix_of_several_kinds_is_plain(model: Path, tmp_path: Path) -> None:
    kept = load(several_kinds(model, tmp_path), kept=True, dtype=torch.float16)
    check_same(kept, load(tmp_path / "stored", dtype=torch.float16))
    assert [kept_ones(kept, index) for index in range(2)] == [{"o", "down"}, {"qkv", "o", "down"}]
    assert [matrix.numbers_NJ.dtype for matrix in matrices(kept, 1).values() if isinstance(matrix, ScaledWeight)] == [
        torch.uint8,
        torch.float8_e4m3fn,
        torch.uint8,
    ]


def test_a_gpu_keeps_the_kinds_that_its_kernels_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If these are large enough, on average; on a CPU none."""
    stored = several_kinds(model, tmp_path)

    def opened(capability: int, least: int, **options: Any) -> dict[str, StoredAs]:
        monkeypatch.setattr(load_module, "_LEAST_NUMBERS", least)
        with pretending(Gpu("NVIDIA Something", capability, 100)):
            return dict(open_for(stored, META, **{"dtype": "float16", **options}).kept)

    assert opened(75, 0) == {}
    both = opened(90, 0)
    four_bits = {name: way for name, way in both.items() if way.bits == 4}
    assert (len(both), len(four_bits)) == (13, 11)
    assert opened(80, 0) == four_bits
    assert both[LAYER(1, "self_attn.o", "weight")] == StoredAs(8, 64, torch.float32)
    assert both[LAYER(1, "mlp.up", "weight")] == StoredAs(4, 128, torch.float16)
    shapes = {name: tensor.numel() for name, tensor in load_file(model / "model.safetensors").items()}
    for kept, capability in ((both, 90), (four_bits, 80)):
        mean = sum(shapes[name] for name in kept) / len(kept)
        assert opened(capability, int(mean)) == kept
        assert opened(capability, int(mean) + 1) == opened(capability, int(mean), tensor_parallel_size=2) == {}
    assert opened(90, 0, dtype="float32") == {}
    assert opened(90, 0, dtype="bfloat16") == both
    assert open_for(stored, CPU, dtype="float16").kept == {}


def test_kernels_know_some_scales(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four bits: the model's type and fp16, which is as good as two numbers in bf16."""
    monkeypatch.setattr(load_module, "_LEAST_NUMBERS", 0)
    for of_scales, known in ((torch.float16, ["float16", "bfloat16"]), (torch.bfloat16, ["bfloat16"])):
        stored, _ = quantized(model, of_packed(4, 128, True, dtype=of_scales), tmp_path / str(of_scales))
        with pretending(Gpu("NVIDIA Something", 90, 100)):
            opened = {dtype: open_for(stored, META, dtype=dtype).kept for dtype in ("float16", "bfloat16", "float32")}
        assert [dtype for dtype, kept in opened.items() if kept] == known


def test_who_opens_knows_what_is_expanded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = several_kinds(model, tmp_path)  # of seven matrices in each of two layers all but one are quantized
    for capability, least, expanded in ((90, 0, 0), (80, 0, 2), (90, 2**40, 13), (75, 0, 13)):
        monkeypatch.setattr(load_module, "_LEAST_NUMBERS", least)
        with pretending(Gpu("NVIDIA Something", capability, 100)):
            assert open_for(stored, META, dtype="float16").num_expanded == expanded
            assert open_for(model, META, dtype="float16").num_expanded == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("settings", "group"),
    [
        (of_gptq(4, 128).settings, 128),
        (of_awq(64).settings, 64),
        (of_awq(0).settings, None),
        (of_packed(4, 128, False).settings, 128),
        (of_packed(4, 0, False).settings, None),
        (of_awq(32).settings, 32),
    ],
)
def test_dummies(model: Path, settings: dict[str, Any], group: int | None, ranks: int) -> None:
    """Of the same size as other dummies, the same on all ranks and where nothing is kept; scales and zeros differ."""
    raw = json.loads((model / "config.json").read_text())
    config, quantization = parse_settings({**raw, "quantization_config": settings})
    dummy = DummyCheckpoint(config, 7, torch.bfloat16, CPU, quantization)
    stored = dummy.stored_as()
    assert len(stored) == 7 * 2
    assert all(way == StoredAs(4, group or dummy.shapes()[name][1], torch.bfloat16) for name, way in stored.items())

    def make(rank: int, **options: Any) -> Weights:
        options = {"dtype": torch.bfloat16, "device": CPU, "interleaved": True, **options}
        return load_weights(dummy, config, rank=rank, size=ranks, **options)

    for rank in range(ranks):
        kept = make(rank, kept=stored)
        check_same(kept, make(rank))
        for index in range(2):
            assert kept_ones(kept, index) == (set() if group == 32 else set(MOST[ranks - 1].split()))
            for matrix in matrices(kept, index).values():
                assert 0.018 < plain(matrix).float().std() < 0.024
                assert abs(plain(matrix).float().mean()) < 0.001
                if isinstance(matrix, ScaledWeight):
                    scales, zeros = matrix.scales_GN & 0xFFFF, matrix.scales_GN >> 16
                    assert len(scales.unique()) >= min(scales.numel() // 2, 100)  # in bfloat16 there are not many
                    assert len(zeros.unique()) == 3
        assert not torch.equal(plain(kept.layers[0].qkv_ND), plain(kept.layers[1].qkv_ND))


@pytest.mark.parametrize(
    "settings", [of_gptq(8, 64).settings, of_gptq(4, 64, ordered=True).settings, of_packed(8, 64, True).settings]
)
def test_dummies_of_what_is_not_kept_are_plain(model: Path, settings: dict[str, Any]) -> None:
    raw = json.loads((model / "config.json").read_text())
    config, quantization = parse_settings({**raw, "quantization_config": settings})
    assert DummyCheckpoint(config, 7, torch.bfloat16, CPU, quantization).stored_as() == {}
