"""GGUF files: the same model as the safetensors they were made from; what is not understood is refused by name."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from checkpoints import checkpoint
from converted import convert
from loaded_weights import load, weight_list
from tercet.model import gguf_file
from tercet.model.checkpoint import read_config
from tercet.model.gguf_file import GgufCheckpoint
from tercet.model.load import resolve_dtype
from tercet.model.rope import Rope


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied", "qwen2", "qwen3", "smollm2"])
@pytest.mark.parametrize("size", [1, 2])
def test_same_weights_as_the_safetensors(family: str, size: int, tmp_path: Path) -> None:
    file = convert(checkpoint(family), tmp_path / "model.gguf")
    for rank in range(size):
        ours, theirs = weight_list(load(file, rank, size)), weight_list(load(checkpoint(family), rank, size))
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied", "qwen2"])
@pytest.mark.parametrize("num_numbers", [1, 2048])
def test_pieces_together_are_the_whole(
    family: str, num_numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = convert(checkpoint(family), tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    at_once = [weight_list(load(file, rank, 2)) for rank in range(2)]
    dequantized: list[int] = []

    def counting(data: Any, kind: Any, source: str, name: str) -> Any:
        values = dequantize(data, kind, source, name)
        dequantized.append(values.size)
        return values

    dequantize = gguf_file._dequantize
    monkeypatch.setattr(gguf_file, "_PIECE_NUMBERS", num_numbers)
    monkeypatch.setattr(gguf_file, "_dequantize", counting)
    for rank, whole in enumerate(at_once):
        assert all(torch.equal(a, b) for a, b in zip(weight_list(load(file, rank, 2)), whole, strict=True))
    config = read_config(file)
    assert max(dequantized) <= max(num_numbers, config.head_dim * config.intermediate_size)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_same_configuration(family: str, tmp_path: Path) -> None:
    ours = read_config(convert(checkpoint(family), tmp_path / "model.gguf"))
    theirs = read_config(checkpoint(family))
    for name in vars(theirs).keys() - {"dtype", "rms_norm_eps"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)


@pytest.mark.parametrize(("kind", "tolerance"), [("Q8_0", 0.01), ("Q4_1", 0.12), ("F16", 0.001), ("BF16", 0.01)])
def test_quantized_matrices_come_close(kind: str, tolerance: float, tmp_path: Path) -> None:
    file = convert(checkpoint("llama"), tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    for ours, theirs in zip(weight_list(load(file)), weight_list(load(checkpoint("llama"))), strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.bfloat16),
        ("Q4_1", torch.bfloat16),
    ],
)
def test_own_type_is_that_of_the_matrices(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = read_config(convert(checkpoint("llama"), tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind]))
    assert resolve_dtype("auto", config, torch.device("cuda")) == dtype


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Rope(10_000.0)),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}, Rope(10_000.0, "linear", 4.0)),
        (
            {
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.type": "yarn",
            },
            Rope(10_000.0, "yarn", 4.0, 128, attention_factor=0.1 * float(np.log(4.0)) + 1.0),
        ),
        # As in llama.cpp: scaling began at the file's context, is linear unless named, and none where that is named.
        (
            {"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn"},
            Rope(10_000.0, "yarn", 4.0, 512, attention_factor=0.1 * float(np.log(4.0)) + 1.0),
        ),
        ({"rope.scaling.factor": 4.0}, Rope(10_000.0, "linear", 4.0)),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, Rope(10_000.0)),
    ],
)
def test_rope_scaling(settings: dict[str, Any], wanted: Rope, tmp_path: Path) -> None:
    assert read_config(convert(checkpoint("llama"), tmp_path / "model.gguf", settings=settings)).rope == wanted


def test_rope_factors(tmp_path: Path) -> None:
    factors = torch.linspace(1, 8, 8)
    config = read_config(convert(checkpoint("llama"), tmp_path / "model.gguf", extra={"rope_freqs.weight": factors}))
    assert config.rope == Rope(10_000.0, "factors", factors=tuple(factors.tolist()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"settings": {"attention.scale": 0.5}}, "llama.attention.scale"),
        ({"settings": {"expert_count": 8.0}}, "llama.expert_count"),
        ({"settings": {"rope.scaling.type": "longrope"}}, "rope.scaling.type is 'longrope'"),
        ({"settings": {"rope.scaling.factor": 0.0}}, "llama.rope.scaling.factor is 0.0; want a number over 0"),
        ({"settings": {"rope.scaling.original_context_length": 0.0}}, "original_context_length is 0.0; want"),
        (
            {"settings": {"rope.scaling.factor": 4.0}, "extra": {"rope_freqs.weight": torch.ones(8)}},
            "rope_freqs.weight beside rope.scaling.type 'linear'; supported: one of the two",
        ),
        ({"extra": {"rope_freqs.weight": torch.arange(8.0)}}, "rope_freqs.weight has 0.0; want numbers over 0"),
        ({"leave_out": "blk.1.ffn_up.weight"}, "missing: model.layers.1.mlp.up_proj.weight"),
        ({"leave_out": "token_embd.weight"}, "token_embd.weight is missing"),
        ({"extra": {"blk.0.ffn_gate_exps.weight": torch.ones(4)}}, "not part of this model: blk.0.ffn_gate_exps"),
    ],
)
def test_refuses_by_name(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load(convert(checkpoint("llama"), tmp_path / "model.gguf", **arguments))


def test_one_part_of_a_split_file(tmp_path: Path) -> None:
    convert(checkpoint("llama"), tmp_path / "model.gguf", tensors_each=12)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for number, part in enumerate(parts, 1):
        with pytest.raises(ValueError, match=rf"{part.name} is part {number} of 3; want them merged"):
            GgufCheckpoint(part)


@pytest.mark.parametrize("arch", ["gemma", "llama4", "deepseek2", "minicpm3"])
def test_refuses_other_architectures(arch: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"architecture is '{arch}'; supported: llama, qwen2, qwen3, phi3"):
        GgufCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 2_000, 30_000])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    file = convert(checkpoint("llama"), tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or not a readable GGUF file"):
        load(file)
