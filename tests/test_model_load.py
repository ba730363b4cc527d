"""From a path to a decoder: settings that go with a model, and settings that do not."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import checkpoint, make_checkpoint
from covering import covering
from hub_latents import DEEPSEEK_V3
from paged_sequences import Sequences
from shapes import SHAPES, write_shape
from tercet.model import load as load_module
from tercet.model.checkpoint import open_model, read_config
from tercet.model.kv_cache import cache_dtype
from tercet.model.load import Opened, load_decoder, open_for, resolve_dtype
from tercet.model.parallel import Group
from tercet.model.weights import expected_shapes
from tercet.triton_kernels.dispatch import Gpu, pretending

CPU, META = torch.device("cpu"), torch.device("meta")
ALONE = Group.single(CPU)


def test_auto_dtype() -> None:
    config = read_config(checkpoint("llama"))
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("bfloat16", config, CPU) == torch.bfloat16
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.float32  # the checkpoint's own
    gemma = replace(read_config(checkpoint("gemma3")), dtype=torch.float16)
    assert resolve_dtype("auto", gemma, torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ValueError, match="which gemma3_text's hidden states outgrow; want bfloat16 or float32"):
        resolve_dtype("float16", gemma, CPU)
    with pytest.raises(ValueError, match="dtype is 'int8'; supported: bfloat16, float16, float32"):
        resolve_dtype("int8", config, CPU)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("named", [None, "float16"])
def test_auto_dtype_where_config_json_names_none(stored: torch.dtype, named: str | None, tmp_path: Path) -> None:
    raw = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "dtype": named}))
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    norms = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 1}  # some are kept in float32
    save_file({**{name: t.to(stored) for name, t in tensors.items()}, **norms}, tmp_path / "model.safetensors")
    wanted = torch.float16 if named else torch.float32 if stored == torch.float64 else stored
    config, _ = open_model(tmp_path)
    assert resolve_dtype("auto", config, torch.device("cuda")) == wanted
    assert resolve_dtype("auto", config, CPU) == torch.float32
    without_weights = resolve_dtype("auto", read_config(tmp_path), torch.device("cuda"))
    assert without_weights == (torch.float16 if named else torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_close(dtype: str) -> None:
    path, prompt = checkpoint("qwen3"), list(range(3, 40))
    logits = []
    for kind in ("float32", dtype):
        decoder = load_decoder(open_for(path, CPU, dtype=kind, max_model_len=128), ALONE)
        run = Sequences(decoder, 1)
        run.cache = [layer.to(decoder.dtype) for layer in run.cache]
        run.step({}, {0: prompt[:-1]})
        logits.append(run.step({0: prompt[-1]}, {})[0].float())
    exact, rough = logits
    assert (rough - exact).norm() < 0.1 * exact.norm()
    assert not torch.equal(rough, exact)


def test_dummy_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint("mistral") / "config.json").read_bytes())
    seen: list[tuple[int, int]] = []
    opened = open_for(tmp_path, CPU, dummy_seed=3)
    decoder = load_decoder(opened, ALONE, progress=lambda done, total: seen.append((done, total)))
    assert decoder.max_model_len == 512
    assert decoder.dtype == torch.float32
    assert seen[-1][0] == seen[-1][1]
    assert Sequences(decoder, 1).step({}, {0: [5, 6, 7]}).isfinite().all()
    with pytest.raises(ValueError, match=r"no .safetensors file"):
        open_for(tmp_path, CPU)


@pytest.mark.parametrize("named", [True, False])
def test_other_weights_are_read_as_the_first_ones_were(named: bool, tmp_path: Path) -> None:
    """Whatever they are stored as: trainers keep 32 bits."""
    first, other = tmp_path / "first", make_checkpoint("llama", tmp_path / "other", seed=1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16)
    model.save_pretrained(first)
    config = json.loads((first / "config.json").read_text())
    if not named:
        del config["dtype"]
        (first / "config.json").write_text(json.dumps(config))
    assert open_for(other, META).dtype is torch.float32
    assert open_for(other, META, like=first).dtype is torch.bfloat16
    assert open_for(other, META, dtype="float16", like=first).dtype is torch.float16
    assert open_for(other, CPU, like=first).dtype is torch.float32
    (first / "model.safetensors").unlink()
    assert open_for(other, META, dummy_seed=0, like=first).dtype is (torch.bfloat16 if named else torch.float32)
    (first / "config.json").write_text(json.dumps({**config, "rope_theta": 5e4, "rope_parameters": None}))
    with pytest.raises(ValueError, match=f"{other}: rope of its configuration is .*; want .*, as of {first}"):
        open_for(other, CPU, like=first)


def test_too_long_and_too_many() -> None:
    with pytest.raises(ValueError, match="--max-model-len is 600; this checkpoint allows 512"):
        open_for(checkpoint("llama"), CPU, max_model_len=600)
    with pytest.raises(ValueError, match="--tensor-parallel-size is 3"):
        load_decoder(open_for(checkpoint("llama"), CPU), Group(0, 3, CPU))


_BILLIONS = {
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.2, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "qwen3-30b-a3b-fp8": 30.5, "qwen3-30b-a3b-awq": 30.5,
    "qwen3-0.6b-fp8": 0.6, "qwen3-8b-fp8": 8.2, "qwen3-8b-awq": 8.2,
    "llama-3.2-1b": 1.24, "llama-3.1-8b": 8.0, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "deepseek-v2-lite": 15.7, "moonlight-16b-a3b": 15.96, "glm-4.7-flash": 29.9,
    "qwen3-vl-2b": 1.72, "qwen3-vl-8b": 8.2, "qwen3.5-9b-seeing": 9.0, "gemma-3-4b": 3.9,
    "internvl3.5-8b": 8.2, "glm-4.1v-9b": 9.4, "gemma-4-31b": 30.70, "gemma-4-26b-a4b": 25.23, "gemma-4-e2b": 4.63,
    "qwen3.5-0.8b": 0.75, "qwen3.5-9b": 9.0, "qwen3.5-27b": 27, "qwen3.5-35b-a3b": 34.7, "qwen3-next-80b-a3b": 79.7,
    "granite-4.0-h-tiny": 6.9, "granite-4.0-h-small": 32.2, "nemotron-3-nano-30b-a3b": 31.6,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_public_shapes_are_supported(name: str, tmp_path: Path) -> None:
    config = read_config(write_shape(name, tmp_path / name))
    billions = sum(map(prod, expected_shapes(config).values())) / 1e9
    assert billions == pytest.approx(_BILLIONS[name], rel=0.01)
    assert json.loads((tmp_path / name / "config.json").read_text()) == SHAPES[name]
    with pytest.raises(ValueError, match="shape 'gpt-2' is unknown"):
        write_shape("gpt-2", tmp_path)


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_fp8_in_the_cache_needs_a_gpu_that_has_it(capability: int) -> None:
    with pretending(Gpu("NVIDIA Something", capability, 100)):
        assert cache_dtype("auto", torch.bfloat16, META) == torch.bfloat16
        if capability >= 89:
            assert cache_dtype("fp8", torch.bfloat16, META) == torch.float8_e4m3fn
            with pytest.raises(
                ValueError, match="got 'fp8_e4m3' for a model in float32; want --dtype bfloat16 or float16"
            ):
                cache_dtype("fp8_e4m3", torch.float32, META)
            return
        wanted = "--kv-cache-dtype got 'fp8' for NVIDIA Something of compute capability 8.0; want a GPU of 8.9"
        with pytest.raises(ValueError, match=wanted):
            cache_dtype("fp8", torch.bfloat16, META)


def opened_for(capability: int, path: Path, *, dtype: str = "bfloat16", **more: Any) -> Opened:
    with pretending(Gpu("NVIDIA Something", capability, 100)):
        return open_for(path, META, dtype=dtype, dummy_seed=0, **more)


@covering(
    2,
    dtype=["bfloat16", "float16", "float32"],
    capability=[75, 80, 89, 90, 100],
    shape_and_least=[("qwen3-8b-fp8", 89), ("qwen3-8b-awq", 80)],
)
def test_weights_are_kept_as_stored_where_kernels_read_them(
    dtype: str, capability: int, shape_and_least: tuple[str, int], tmp_path: Path
) -> None:
    """Else each step would expand them."""
    shape, least = shape_and_least
    opened = opened_for(capability, write_shape(shape, tmp_path), dtype=dtype)
    are_read = dtype != "float32" and capability >= least
    assert len(opened.kept) == (7 * 36 if are_read else 0)


def test_weights_of_small_matrices_are_not_kept_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On average, and as each rank has them."""
    small, large = (write_shape(f"qwen3-{size}-fp8", tmp_path / size) for size in ("0.6b", "8b"))
    for size in (1, 2, 4, 8):
        config = opened_for(90, large, tensor_parallel_size=size).config
        heads, kv_heads = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
        in_layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
        for least, stays in ((in_layer // 7 // size, True), (in_layer // 7 // size + 1, False)):
            monkeypatch.setattr(load_module, "_LEAST_NUMBERS", least)
            assert bool(opened_for(90, large, tensor_parallel_size=size).kept) == stays
        monkeypatch.undo()
        assert bool(opened_for(90, large, tensor_parallel_size=size).kept) == (size < 4)
        assert not opened_for(90, small, tensor_parallel_size=size).kept


def test_what_each_rank_has_whole_counts_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3's latents and what its queries are made from, among matrices of which eight ranks have an eighth."""
    config = {**DEEPSEEK_V3, "num_hidden_layers": 2, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hidden, heads, mlp = 7168, 128, 18432
    whole = hidden * (1536 + 576)
    cut = 1536 * heads * 192 + heads * 128 * hidden + 3 * hidden * mlp
    for least, stays in (((whole + cut // 8) // 7, True), ((whole + cut // 8) // 7 + 1, False)):
        monkeypatch.setattr(load_module, "_LEAST_NUMBERS", least)
        assert bool(opened_for(90, tmp_path, tensor_parallel_size=8).kept) == stays
    monkeypatch.undo()
    assert opened_for(90, tmp_path, tensor_parallel_size=8).kept
