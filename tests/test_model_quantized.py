"""Quantized checkpoints: the numbers that are stored stand for the same in transformers and here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import checkpoint, random_prompts, reference_greedy
from covering import long
from loaded_weights import load, tensors_of
from quantized_checkpoints import Way, awq, fp8, gptq, int8, nvfp4, packed, quantized
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from tercet.model import quantized_matrices
from tercet.model.checkpoint import open_model
from tercet.model.quantization import quantization_of
from tercet.model.weights import load_weights
from whole_engine import ids_of

FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "desc_act": True, "sym": False, "group_size": 32}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    kind = "float" if form in ("float-quantized", "nvfp4-pack-quantized") else "int"
    group = {"targets": ["Linear"], "weights": {"type": kind, **weights}, "input_activations": None}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", **groups}


WAYS = {
    "fp8, blocks": Way({**FP8, "weight_block_size": [32, 16]}, fp8(32, 16)),
    "fp8, blocks that do not fit": Way({**FP8, "weight_block_size": [40, 36]}, fp8(40, 36, dtype=torch.bfloat16)),
    "fp8, one scale": Way({**FP8, "activation_scheme": "static"}, fp8(0, 0, "weight_scale")),
    "fbgemm": Way({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8(1, 0, "weight_scale")),
    "float, rows": Way(compressed("float-quantized", num_bits=8, strategy="channel"), fp8(1, 0, "weight_scale")),
    "float, blocks": Way(
        compressed("float-quantized", num_bits=8, strategy="block", block_structure=[16, 32]),
        fp8(16, 32, "weight_scale"),
    ),
    "int8, rows": Way(compressed("int-quantized", num_bits=8, strategy="channel"), int8(0, False)),
    "int8, groups": Way(compressed("int-quantized", num_bits=8, strategy="group"), int8(16, True)),
    "packed 4": Way(compressed("pack-quantized", num_bits=4, strategy="group"), packed(4, 32, False)),
    "packed 4, zeros": Way(compressed("pack-quantized", num_bits=4, strategy="group"), packed(4, 16, True)),
    "packed 4, order": Way(
        compressed("pack-quantized", num_bits=4, actorder="group"), packed(4, 16, True, ordered=True)
    ),
    "packed 8": Way(compressed("pack-quantized", num_bits=8, strategy="channel"), packed(8, 0, False)),
    "modelopt": Way({**MODELOPT, "quant_algo": "FP8"}, fp8(0, 0, "weight_scale")),
    "modelopt, rows": Way({**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8(1, 0, "weight_scale")),
    "modelopt, blocks": Way({**MODELOPT, "quant_algo": "FP8_PB_WO"}, fp8(128, 128, "weight_scale")),
    "modelopt, nvfp4": Way({**MODELOPT, "quant_algo": "NVFP4", "group_size": 16}, nvfp4(divides=False)),
    "nvfp4": Way(
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16), nvfp4(divides=True)
    ),
    "gptq 4": Way({**GPTQ, "bits": 4, "group_size": 32}, gptq(4, 32, 1)),
    "gptq 4, order": Way({**GPTQ, "bits": 4, "group_size": 16}, gptq(4, 16, 1, ordered=True)),
    "gptq 8, version 2": Way({**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}, gptq(8, 0, 0)),
    "gptq 2": Way({**GPTQ, "bits": 2, "group_size": 16}, gptq(2, 16, 1)),
    "awq": Way({**AWQ, "group_size": 16}, awq(16)),
    "awq, rows": Way({**AWQ, "group_size": -1}, awq(0)),
}


def all_tensors(path: Path, rank: int = 0, size: int = 1) -> list[Tensor]:
    weights = load(path, rank, size)
    return [weights.embedding_VD, *(tensor for layer in weights.layers for tensor in tensors_of(layer))]


FAMILIES = dict.fromkeys(WAYS, "qwen3") | {"gptq 4": "llama-bias-tied", "fp8, blocks": "qwen3-moe", "awq": "gemma3"}
# With latents, of whose matrices a rank's rows begin in the middle of blocks and of words.
FAMILIES |= {"fp8, blocks that do not fit": "deepseek-v3", "awq, rows": "deepseek-v2", "packed 8": "minicpm3"}
# Of which neighbours turn together: pieces may begin with either.
FAMILIES |= {"float, rows": "ernie4.5", "packed 4, zeros": "ernie4.5"}


OTHERS = {
    *("fp8, one scale", "modelopt, rows", "modelopt, blocks", "float, blocks", "int8, rows", "gptq 8, version 2"),
    *("packed 8", "awq, rows"),
}
"""For which others stand: the tensors are of another's kind, or of another number of bits."""


@pytest.mark.parametrize("way", [long(way) if way in OTHERS else way for way in WAYS])
def test_weights_are_what_they_stand_for(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, and whatever the pieces in which they come."""
    stored, plain = quantized(checkpoint(FAMILIES[way]), WAYS[way], tmp_path)
    for rank, size, numbers in [(0, 1, 2**22), (0, 2, 300), (1, 2, 1000), (3, 4, 1)]:
        monkeypatch.setattr(quantized_matrices, "_PIECE_NUMBERS", numbers)
        for ours, meant in zip(all_tensors(stored, rank, size), all_tensors(plain, rank, size), strict=True):
            torch.testing.assert_close(ours, meant, rtol=1e-6, atol=0)


@pytest.mark.parametrize("way", [long(way) if way in OTHERS else way for way in WAYS])
def test_compilers_open_it_too(way: str, tmp_path: Path) -> None:
    """For the meta device, which has no numbers."""
    stored, _ = quantized(checkpoint("qwen3"), WAYS[way], tmp_path)
    config, tensors = open_model(stored, torch.device("meta"))
    there, here = open_model(stored)
    assert (config, tensors.shapes()) == (there, here.shapes())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_a_gpu_makes_the_same_numbers(way: str, tmp_path: Path) -> None:
    stored, _ = quantized(checkpoint(FAMILIES[way]), WAYS[way], tmp_path)
    device = torch.device("cuda", 0)
    config, tensors = open_model(stored, device)
    options: dict[str, Any] = {"rank": 1, "size": 2, "dtype": torch.bfloat16}
    weights = load_weights(tensors, config, device=device, **options)
    plain = load(stored, 1, 2, dtype=torch.bfloat16)
    for there, here in zip(weights.layers, plain.layers, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors_of(there), tensors_of(here), strict=True))


def test_an_engine_says_what_transformers_says(tmp_path: Path) -> None:
    """A model whose matrices are stacked."""
    way = Way(compressed("pack-quantized", num_bits=4, strategy="group"), packed(4, 8, True))
    stored, plain = quantized(checkpoint("phi3"), way, tmp_path)
    prompts = random_prompts(4, 5, 60)
    with LLM(stored, device="cpu", kv_cache_memory=2**23) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert ids_of(outputs) == reference_greedy(plain, prompts, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("int4", "quantization_config is 'int4'; want one object"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: 'fp8', 'fbgemm_fp8', "),
        ({"bits": 4}, "quant_method is None; supported"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]; supported: two whole numbers over 0"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'; supported: none, 'e4m3', 'float8_e4m3fn'"),
        ({**GPTQ, "bits": 3}, "bits is 3; supported: 2, 4, 8"),
        ({**GPTQ, "bits": 4, "group_size": None}, "group_size is None; supported: whole numbers from -1 on"),
        (
            {**GPTQ, "bits": 4, "group_size": 32, "dynamic": {"+:.*down.*": {"bits": 8}}},
            "dynamic is .*; supported: none",
        ),
        ({**GPTQ, "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; supported: none, 'gemm', 'GEMM'"),
        ({**AWQ, "zero_point": False}, "zero_point is False; supported: True"),
        (compressed("float-quantized", num_bits=4), r"group_0.weights.num_bits is 4; supported: 8"),
        (compressed("nvfp4-pack-quantized", num_bits=8), r"group_0.weights.num_bits is 8; supported: 4"),
        (compressed("mxfp8-quantized", num_bits=8), "format is 'mxfp8-quantized'; supported: "),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; supported: 'FP8', "),
        (compressed("pack-quantized", num_bits=3), r"group_0.weights.num_bits is 3; supported: 4, 8"),
        ({**compressed("dense", num_bits=8), "quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        (
            {**compressed("dense", num_bits=8), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format",
        ),
        ({**compressed("dense", num_bits=8), "transform_config": {"config_groups": {"a": 1}}}, "transform_config is"),
    ],
)
def test_settings_that_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantization_of({"quantization_config": settings})


O_PROJ = "model.layers.0.self_attn.o_proj."


@pytest.mark.parametrize(
    ("way", "changes", "message"),
    [
        ("fp8, blocks", {"weight_scale_inv": None}, r"o_proj.weight is float8_e4m3fn \[64, 64\]; want a weight_scale"),
        (
            "fp8, blocks",
            {"weight_scale_inv": torch.ones(3, 4)},
            r"scale_inv is float32 \[3, 4\]; want .* of 32 x 16",
        ),
        (
            "int8, groups",
            {"weight_zero_point": torch.ones(64, 1, dtype=torch.int8)},
            r"scale's shape, \[64, 4\]",
        ),
        ("packed 4", {"weight_shape": None}, "weight_packed is .*; want weight_shape beside it"),
        ("packed 4", {"weight_shape": torch.tensor([64, 40])}, "weight_packed is .* for 64 x 40 of them"),
        ("packed 4", {"weight_packed": torch.zeros(64, 8, dtype=torch.uint8)}, "packed is uint8 .* want words of type"),
        ("packed 4", {"weight_packed": torch.zeros(64, 8, dtype=torch.int16)}, "is of type I16; supported: "),
        ("packed 4", {"weight_scale": torch.ones(64, 3)}, "weight_scale is .* groups of which 64 columns are"),
        (
            "packed 4, order",
            {"weight_g_idx": torch.full((64,), 4, dtype=torch.int32)},
            "want numbers of 4 groups",
        ),
        ("packed 4, order", {"weight_g_idx": None}, "weight_packed is .* want weight_g_idx beside it"),
        (
            "packed 4, zeros",
            {"weight_zero_point": torch.ones(64, 4).to(torch.int8)},
            "point is int8 .* words of type I32",
        ),
        ("packed 4, zeros", {"weight_zero_point": torch.ones(8, 2).to(torch.int32)}, "point is .* want 8 x 4 words"),
        ("nvfp4", {"weight_scale": None}, "weight_global_scale is .* want weight_scale beside it"),
        ("nvfp4", {"weight_scale": torch.ones(64, 4)}, "scale is float32 .* want numbers of type F8_E4M3"),
        ("nvfp4", {"weight_packed": torch.zeros(64, 24, dtype=torch.uint8)}, "scale is .* 64 rows of one for 16 of 48"),
        ("nvfp4", {"weight_packed": torch.zeros(64, 32)}, "packed is float32 .* want bytes of type U8"),
        ("modelopt, nvfp4", {"weight_scale_2": torch.ones(2)}, r"weight_scale_2 is float32 \[2\]; want one number"),
        ("gptq 4", {"g_idx": None}, "qweight is .* want g_idx beside it"),
        ("gptq 4", {"scales": None}, "qweight is .* want scales beside it"),
        ("gptq 4", {"scales": torch.ones(3, 64)}, r"scales is .* want 2 groups of 64"),
        ("gptq 4", {"qzeros": torch.ones(2, 9, dtype=torch.int32)}, r"qzeros is .* want 2 groups of 8 words"),
        ("gptq 4", {"g_idx": torch.zeros(63, dtype=torch.int32)}, "g_idx is .* 64 columns"),
        ("awq", {"qweight": torch.ones(64, 8)}, "qweight is float32 .* want words of type I32"),
        ("awq", {"weight": torch.ones(64, 64, dtype=torch.int8)}, "o_proj.weight is int8"),
        ("awq", {"surprise": torch.ones(1)}, "not part of this model: model.layers.0.self_attn.o_proj.surprise"),
    ],
)
def test_tensors_that_do_not_fit(way: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    stored, _ = quantized(checkpoint("llama"), WAYS[way], tmp_path)
    file = stored / "model.safetensors"
    changed = load_file(file) | {O_PROJ + part: tensor for part, tensor in changes.items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
    with pytest.raises(ValueError, match=message):
        load(stored)


def test_modelopt_s_own_file(tmp_path: Path) -> None:
    """It counts where config.json is silent."""
    stored, plain = quantized(checkpoint("llama"), WAYS["modelopt"], tmp_path)
    config = json.loads((stored / "config.json").read_text())
    del config["quantization_config"]
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"is of type F8_E4M3, as quantized weights are; config\.json has no quantization_config"
    ):
        load(stored)
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file = stored / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    for ours, meant in zip(all_tensors(stored), all_tensors(plain), strict=True):
        torch.testing.assert_close(ours, meant, rtol=1e-6, atol=0)
    file.write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization is 'FP8'; want an object"):
        load(stored)


def test_what_is_not_used_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A setting that nobody knows; scales of a cache; and those of activations, which are not quantized: no word."""
    stored, _ = quantized(checkpoint("qwen3"), Way({**FP8, "surprise": 1}, fp8(0, 0, "weight_scale")), tmp_path)
    file = stored / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, file)
    load(stored)
    first, second = (record.message for record in caplog.records)
    assert first == "config.json: fields of quantization_config that are not used: surprise"
    assert second.endswith("its scales of keys and values are not used: an FP8 cache has none here")
