"""GGUF files: the same model as the safetensors they were made from; what is not understood is refused by name."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import checkpoint
from loaded_weights import load, weight_list
from tercet.model import gguf_file
from tercet.model.checkpoint import read_config
from tercet.model.gguf_file import GgufCheckpoint
from tercet.model.load import resolve_dtype
from tercet.model.rope import Rope

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def permuted(tensor: Tensor, num_heads: int) -> Tensor:
    """The order of llama.cpp's converter: the two halves of a head become pairs side by side."""
    grid = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return grid.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    family: str,
    file: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    numbers: dict[str, float] | None = None,
    texts: dict[str, str] | None = None,
    extra: dict[str, Tensor] | None = None,
    leave_out: str = "",
    tensors_each: int = 0,
) -> Path:
    """The safetensors checkpoint of `family` as GGUF, matrices quantized to `kind`; split where a file has its fill."""
    config = read_config(checkpoint(family))
    arch = "llama" if config.family == "mistral" else config.family
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=tensors_each)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    for name, number in (numbers or {}).items():
        writer.add_float32(f"{arch}.{name}", number)
    for name, text in (texts or {}).items():
        writer.add_string(f"{arch}.{name}", text)
    tensors = {gguf_name(n): t for n, t in load_file(checkpoint(family) / "model.safetensors").items()}
    for name, tensor in {**tensors, **(extra or {})}.items():
        if name == leave_out:
            continue
        if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            tensor = permuted(tensor, config.num_heads if ".attn_q." in name else config.num_kv_heads)
        wanted = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = np.ascontiguousarray(tensor.numpy())
        data = data if wanted == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(data, wanted)
        writer.add_tensor(name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied", "qwen2", "qwen3", "smollm2"])
@pytest.mark.parametrize("size", [1, 2])
def test_same_weights_as_the_safetensors(family: str, size: int, tmp_path: Path) -> None:
    file = write_gguf(family, tmp_path / "model.gguf")
    for rank in range(size):
        ours, theirs = weight_list(load(file, rank, size)), weight_list(load(checkpoint(family), rank, size))
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied", "qwen2"])
@pytest.mark.parametrize("num_numbers", [1, 2048])
def test_pieces_together_are_the_whole(
    family: str, num_numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(family, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
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
    ours = read_config(write_gguf(family, tmp_path / "model.gguf"))
    theirs = read_config(checkpoint(family))
    for name in vars(theirs).keys() - {"dtype", "rms_norm_eps"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)


@pytest.mark.parametrize(("kind", "tolerance"), [("Q8_0", 0.01), ("Q4_1", 0.12), ("F16", 0.001), ("BF16", 0.01)])
def test_quantized_matrices_come_close(kind: str, tolerance: float, tmp_path: Path) -> None:
    file = write_gguf("llama", tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
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
    config = read_config(write_gguf("llama", tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind]))
    assert resolve_dtype("auto", config, torch.device("cuda")) == dtype


@pytest.mark.parametrize(
    ("numbers", "texts", "wanted"),
    [
        ({}, {}, Rope(10_000.0)),
        ({"rope.scaling.factor": 4.0}, {"rope.scaling.type": "linear"}, Rope(10_000.0, "linear", 4.0)),
        (
            {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope.scaling.type": "yarn"},
            Rope(10_000.0, "yarn", 4.0, 128, attention_factor=0.1 * float(np.log(4.0)) + 1.0),
        ),
        # As in llama.cpp: scaling began at the file's context, is linear unless named, and none where that is named.
        (
            {"rope.scaling.factor": 4.0},
            {"rope.scaling.type": "yarn"},
            Rope(10_000.0, "yarn", 4.0, 512, attention_factor=0.1 * float(np.log(4.0)) + 1.0),
        ),
        ({"rope.scaling.factor": 4.0}, {}, Rope(10_000.0, "linear", 4.0)),
        ({"rope.scaling.factor": 4.0}, {"rope.scaling.type": "none"}, Rope(10_000.0)),
    ],
)
def test_rope_scaling(numbers: dict[str, float], texts: dict[str, str], wanted: Rope, tmp_path: Path) -> None:
    assert read_config(write_gguf("llama", tmp_path / "model.gguf", numbers=numbers, texts=texts)).rope == wanted


def test_rope_factors(tmp_path: Path) -> None:
    factors = torch.linspace(1, 8, 8)
    config = read_config(write_gguf("llama", tmp_path / "model.gguf", extra={"rope_freqs.weight": factors}))
    assert config.rope == Rope(10_000.0, "factors", factors=tuple(factors.tolist()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"numbers": {"attention.scale": 0.5}}, "llama.attention.scale"),
        ({"numbers": {"expert_count": 8.0}}, "llama.expert_count"),
        ({"texts": {"rope.scaling.type": "longrope"}}, "rope.scaling.type is 'longrope'"),
        ({"numbers": {"rope.scaling.factor": 0.0}}, "llama.rope.scaling.factor is 0.0; want a number over 0"),
        ({"numbers": {"rope.scaling.original_context_length": 0.0}}, "original_context_length is 0.0; want"),
        (
            {"numbers": {"rope.scaling.factor": 4.0}, "extra": {"rope_freqs.weight": torch.ones(8)}},
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
        load(write_gguf("llama", tmp_path / "model.gguf", **arguments))


def test_one_part_of_a_split_file(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "model.gguf", tensors_each=12)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for number, part in enumerate(parts, 1):
        with pytest.raises(ValueError, match=rf"{part.name} is part {number} of 3; want them merged"):
            GgufCheckpoint(part)


@pytest.mark.parametrize("arch", ["gemma", "llama4"])
def test_refuses_other_architectures(arch: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"architecture is '{arch}'; supported: llama, qwen2, qwen3, phi3"):
        GgufCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 2_000, 30_000])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    file = write_gguf("llama", tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or not a readable GGUF file"):
        load(file)
