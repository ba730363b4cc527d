"""Weights that stay in FP8 beside their scales: which ones do, and that they stand for the numbers of plain ones.

What is compared with comes from checkpoints of plain numbers, which know no FP8 (`quantized_checkpoints.py`).
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import checkpoint, make_checkpoint
from loaded_weights import CPU, check_same, load, matrices
from quantized_checkpoints import Way, change, fp8, int8, quantized
from tercet.model import load as load_module
from tercet.model import quantized_matrices
from tercet.model.checkpoint import parse_settings
from tercet.model.dummy import DummyCheckpoint
from tercet.model.load import open_for
from tercet.model.rank_weights import Weights
from tercet.model.weights import load_weights
from tercet.triton_kernels.dispatch import Gpu, pretending
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.widen import plain
from test_model_quantized import FP8 as SETTINGS
from test_model_quantized import compressed

META = torch.device("meta")
RANKS = [(0, 1), (0, 2), (1, 2), (3, 4)]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 192, "num_attention_heads": 8}
COLUMNS = {"qkv": 128, "o": 256, "gate_up": 128, "down": 192}
"""Of the matrices of most families here, in all."""


def of_blocks(rows: int, columns: int) -> Way:
    return Way({**SETTINGS, "weight_block_size": [rows, columns]}, fp8(rows, columns))


WAYS = {
    "blocks": of_blocks(32, 64),
    "blocks of odd rows": of_blocks(23, 64),
    "blocks of few columns": of_blocks(64, 16),
    "blocks of odd columns": of_blocks(40, 36),
    "blocks wider than all": of_blocks(16, 256),
    "one scale": Way({**SETTINGS, "activation_scheme": "static"}, fp8(0, 0, "weight_scale")),
    "fbgemm": Way({"quant_method": "fbgemm_fp8"}, fp8(1, 0, "weight_scale")),
    "float, rows": Way(
        compressed("float-quantized", num_bits=8, strategy="channel"), fp8(1, 0, "weight_scale", torch.bfloat16)
    ),
    "float, groups": Way(compressed("float-quantized", num_bits=8, strategy="group"), fp8(1, 64, "weight_scale")),
    "float, blocks": Way(
        compressed("float-quantized", num_bits=8, strategy="block", block_structure=[16, 64]),
        fp8(16, 64, "weight_scale"),
    ),
    "int8": Way(compressed("int-quantized", num_bits=8, strategy="channel"), int8(0, False)),
}
FAMILIES = {"blocks": "phi3-short", "one scale": "gemma3", "fbgemm": "llama-bias-tied", "float, blocks": "qwen3-moe"}
FAMILIES |= {"float, rows": "glm", "float, groups": "ernie4.5"}  # whose heads come in another order
GROUPS = {
    "blocks": 64,
    "blocks of odd rows": 64,
    "float, groups": 64,
    "float, blocks": 64,
    "one scale": 0,
    "fbgemm": 0,
    "float, rows": 0,
    "blocks wider than all": 0,
}
"""Columns that share a scale; 0: all. Of others nothing stays in FP8."""


def stays(way: str, kind: str, size: int) -> bool:
    """Whether a matrix does, on each of so many ranks."""
    group, whole = GROUPS.get(way), COLUMNS[kind]
    mine = whole // size if kind in ("o", "down") else whole
    return group is not None and mine % 64 == 0 and (group in (0, whole) or mine % group == 0)


@pytest.mark.parametrize("way", WAYS)
def test_they_stand_for_the_numbers_of_plain_ones(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, with gate and up rows in turns and not, and whatever the pieces in which they come."""
    family = FAMILIES.get(way, "qwen3")
    model = make_checkpoint(family, tmp_path / "model", seed=random.randrange(2**32), **SIZES)
    stored, meant = quantized(model, WAYS[way], tmp_path)
    heads = {"gemma3": 8 * 24, "glm": 8 * 24, "ernie4.5": 8 * 24}.get(family)
    heads = heads or {"llama-bias-tied": 128, "phi3-short": 128}.get(family, 256)
    monkeypatch.setitem(COLUMNS, "o", heads)
    for number, (rank, size) in enumerate(RANKS):
        dtype, fused = (torch.bfloat16, torch.float32)[number % 2], number % 3 == 1
        monkeypatch.setattr(quantized_matrices, "_PIECE_NUMBERS", (2**22, 300, 1000, 1)[number])
        kept = load(stored, rank, size, dtype=dtype, fused=fused, kept=True)
        check_same(kept, load(meant, rank, size, dtype=dtype, fused=fused))
        check_same(kept, load(stored, rank, size, dtype=dtype, fused=fused))
        for index in range(len(kept.layers)):
            for kind, matrix in matrices(kept, index).items():
                assert isinstance(matrix, ScaledWeight) == stays(way, kind, size), (kind, rank, size)
                if isinstance(matrix, ScaledWeight):
                    assert matrix.numbers_NJ.is_contiguous()
                    assert matrix.scales_GN.is_contiguous()


def test_a_matrix_of_several_kinds_is_plain(tmp_path: Path) -> None:
    """Where one of what it is made of is plain, has other groups, or zeros; the others stay in FP8."""
    stored, _ = quantized(make_checkpoint("llama", tmp_path / "model", **SIZES), WAYS["float, groups"], tmp_path)
    layer = "model.layers.{}.{}_proj.{}".format
    shape = load_file(stored / "model.safetensors")[layer(1, "mlp.up", "weight_scale")].shape
    change(
        stored,
        {
            layer(0, "self_attn.k", "weight"): torch.randn(32, 128),
            layer(0, "self_attn.k", "weight_scale"): None,
            layer(0, "self_attn.k", "input_scale"): None,
            layer(0, "mlp.gate", "weight_scale"): torch.rand(192, 1),
            layer(1, "mlp.up", "weight_zero_point"): torch.randn(shape).to(torch.float8_e4m3fn),
            layer(1, "self_attn.o", "weight"): torch.randint(-128, 128, (128, 128), dtype=torch.int8),
        },
    )
    kept = load(stored, kept=True)
    check_same(kept, load(stored))
    for index, plain_ones in enumerate([{"qkv", "gate_up"}, {"o", "gate_up"}, set[str]()]):
        found = {kind for kind, matrix in matrices(kept, index).items() if isinstance(matrix, Tensor)}
        assert found == plain_ones


def test_on_a_cpu_nothing_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And on a GPU nothing of a model as small as this."""
    stored, _ = quantized(make_checkpoint("llama", tmp_path / "model", **SIZES), WAYS["blocks"], tmp_path)
    with pretending(Gpu("NVIDIA H200", 90, 132)):
        assert open_for(stored, META, dtype="bfloat16").kept == {}
        monkeypatch.setattr(load_module, "_LEAST_NUMBERS", 1)
        assert len(open_for(stored, META, dtype="bfloat16").kept) == 3 * 7
    assert open_for(stored, CPU, dtype="bfloat16").kept == {}


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize(
    "settings",
    [
        {**SETTINGS, "weight_block_size": [40, 64]},
        {"quant_method": "fbgemm_fp8"},
        compressed("float-quantized", num_bits=8),
    ],
)
def test_dummies_in_fp8(family: str, settings: dict[str, Any]) -> None:
    """Of the same size as other dummies, the same on all ranks and where nothing stays in FP8; scales differ."""
    raw = {**json.loads((checkpoint(family) / "config.json").read_text()), **SIZES}
    config, quantization = parse_settings({**raw, "quantization_config": settings})
    dummy = DummyCheckpoint(config, 7, torch.bfloat16, CPU, quantization)

    def make(rank: int, size: int, kept: Any = None) -> Weights:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU, "kept": kept, "interleaved": True}
        return load_weights(dummy, config, rank=rank, size=size, **options)

    whole = make(0, 1, dummy.stored_as())
    check_same(whole, make(0, 1))
    for rank in range(2):
        check_same(make(rank, 2, dummy.stored_as()), make(rank, 2))
    for index in range(config.num_layers):
        for matrix in matrices(whole, index).values():
            assert isinstance(matrix, ScaledWeight)
            assert 0.018 < plain(matrix).float().std() < 0.024
            assert len(matrix.scales_GN.unique()) >= matrix.scales_GN.numel() // 40
    assert not torch.equal(plain(whole.layers[0].qkv_ND), plain(whole.layers[1].qkv_ND))
    config, quantization = parse_settings({**raw, "quantization_config": compressed("int-quantized", num_bits=8)})
    assert DummyCheckpoint(config, 7, torch.bfloat16, CPU, quantization).stored_as() == {}
