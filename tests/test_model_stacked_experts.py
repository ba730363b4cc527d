"""Experts that lie in one tensor a layer, plain or in MXFP4: read as transformers reads them, refused where they do not
fit together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_greedy, reference_model
from llama_fields import LLAMA
from mxfp4_checkpoints import in_mxfp4
from paged_sequences import Sequences, make_decoder
from quantized_checkpoints import change
from shapes import SHAPES
from tercet.model.blocks import Clamp
from tercet.model.checkpoint import open_model, parse_settings
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from tercet.model.rank_weights import ExpertWeights
from tercet.model.weights import ScaledCheckpoint, load_weights
from tercet.triton_kernels.scaled_weight import ScaledWeight, expand_reference

CPU = torch.device("cpu")
GPT_OSS: dict[str, Any] = {
    **LLAMA,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
}
BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    stored, plain = in_mxfp4(checkpoint("gpt-oss"), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        stored, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "experts" in name:
            assert torch.equal(theirs.get_parameter(name).float(), tensor)
    prompts = random_prompts(6, 5, 40, seed=9)
    wanted = reference_greedy(plain, prompts, 24)
    assert Sequences(make_decoder(stored), len(prompts)).greedy(prompts, 24) == wanted


def test_limits_of_gates_are_read(tmp_path: Path) -> None:
    """Such as gates meet: the models' own are out of reach of these."""
    model = make_checkpoint("gpt-oss", tmp_path / "model", swiglu_limit=1.5, swiglu_alpha=1.1)
    (ids,) = random_prompts(1, 40, 40, seed=3)
    with torch.inference_mode():
        logits, known = (
            reference_model(path)(torch.tensor([ids])).logits[0, -1] for path in (model, checkpoint("gpt-oss"))
        )
    got = Sequences(make_decoder(model), 1).step({}, {0: ids})[0]
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    assert not torch.allclose(logits, known, rtol=0.01)


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_those_of_the_whole(dim: int, tmp_path: Path) -> None:
    """Also where a slice of columns cuts a block, as that of a rank may."""
    _, tensors = open_model(in_mxfp4(checkpoint("gpt-oss"), tmp_path)[0], CPU)
    _, plain = open_model(tmp_path / "plain", CPU)
    for name in ("gate_up_proj", "down_proj"):
        stack = f"model.layers.2.mlp.experts.{name}"
        name = f"model.layers.2.mlp.experts.5.{name}.weight"
        whole = reference_model(tmp_path / "plain").get_parameter(stack)[5]
        for checkpoint_read in (tensors, plain):
            got = torch.cat(list(checkpoint_read.read(name, dim, 11, 50)), 0)
            assert torch.equal(got, whole.t().narrow(dim, 11, 39))
            assert checkpoint_read.shapes()[name] == whole.t().shape


@pytest.mark.parametrize(("size", "kept"), [(1, {"gate_up", "down"}), (2, {"gate_up"})])
def test_what_is_kept_as_stored(size: int, kept: set[str], tmp_path: Path) -> None:
    """On each rank the numbers that it would have had expanded; what cuts a group of columns is expanded."""
    config, tensors = open_model(in_mxfp4(checkpoint("gpt-oss"), tmp_path)[0], CPU)
    assert isinstance(tensors, ScaledCheckpoint)
    assert len(tensors.stored_as()) == len(tensors.quantized()) == 3 * 6 * 2
    for rank in range(size):
        options: Any = {"rank": rank, "size": size, "dtype": torch.bfloat16, "device": CPU}
        stored = load_weights(tensors, config, **options, kept=tensors.stored_as())
        expanded = load_weights(tensors, config, **options)
        for one, other in zip(stored.layers, expanded.layers, strict=True):
            assert isinstance(one.mlp, ExpertWeights)
            assert isinstance(other.mlp, ExpertWeights)
            found = {"gate_up": (one.mlp.gate_up_E2FD, other.mlp.gate_up_E2FD)}
            found["down"] = one.mlp.down_EDF, other.mlp.down_EDF
            for name, (mine, wanted) in found.items():
                assert isinstance(mine, ScaledWeight) == (name in kept)
                numbers = expand_reference(mine) if isinstance(mine, ScaledWeight) else mine
                assert isinstance(wanted, Tensor)
                assert torch.equal(numbers.view(wanted.shape), wanted)


def test_numbers_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    stored, _ = in_mxfp4(checkpoint("gpt-oss"), tmp_path)
    scales = load_file(stored / "model.safetensors")[SCALES]
    scales[4, 100, 1] = 129
    change(stored, {SCALES: scales})
    config, tensors = open_model(stored, CPU)
    assert isinstance(tensors, ScaledCheckpoint)
    options: Any = {"rank": 0, "size": 1, "dtype": torch.bfloat16, "device": CPU}
    with pytest.raises(ValueError, match=r"experts\.4\.gate_up_proj\.weight has a scale of 2\^2; want 2\^1 at most"):
        load_weights(tensors, config, **options, kept=tensors.stored_as())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALES: None}, "gate_up_proj_blocks is uint8 .*; want .*gate_up_proj_scales beside it"),
        ({SCALES: torch.zeros(6, 192, 3, dtype=torch.uint8)}, r"_scales is uint8 \[6, 192, 3\]; want .* \[6, 192, 2\]"),
        ({SCALES: torch.zeros(6, 192, 2)}, r"_scales is float32 \[6, 192, 2\]; want bytes"),
        ({BLOCKS: torch.zeros(6, 192, 2, 8, dtype=torch.uint8)}, r"_blocks is uint8 \[6, 192, 2, 8\]; want bytes"),
        ({BLOCKS: None}, r"_scales is uint8 \[6, 192, 2\]; want plain numbers"),
        ({BLOCKS: None, SCALES: None}, "missing: model.layers.1.mlp.experts.0.gate_up_proj.weight"),
        ({"model.layers.0.mlp.experts.down_proj_bias": None}, "missing: model.layers.0.mlp.experts.down_proj_bias"),
        ({"model.layers.0.self_attn.sinks": torch.zeros(4)}, r"self_attn.sinks \[4\] \(want \[6\]\)"),
    ],
)
def test_what_does_not_fit_together(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    stored, _ = in_mxfp4(checkpoint("gpt-oss"), tmp_path)
    change(stored, changes)
    with pytest.raises(ValueError, match=message):
        load_decoder(open_for(stored, CPU), Group.single(CPU))


def test_what_openai_writes_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """As in the files of gpt-oss-20b and 120b."""
    own = {"experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    said = {**SHAPES["gpt-oss-20b"], **own, "num_hidden_layers": 3, "quantization_config": settings}
    config, quantization = parse_settings(said)
    assert quantization is not None
    assert quantization.way == "mxfp4"
    assert config.experts is not None
    assert (config.experts.count, config.experts.each, config.experts.normed) == (32, 4, True)
    assert config.experts.clamp == Clamp(7.0, 1.702)
    assert config.layer_windows == (128, 0, 128)
    assert config.resolve_max_model_len(None) == 131072
    silent = parse_settings({**GPT_OSS, "head_dim": 64})[0]
    assert (silent.rope, silent.sinks, silent.qkv_bias, silent.o_bias) == (config.rope, True, True, True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8'; supported for gpt_oss: mxfp4"),
        ({"compression_config": {"quant_method": "fp8"}}, "quant_method is 'fp8'; supported for gpt_oss: mxfp4"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0; want a number over 0"),
        ({"num_local_experts": 3}, "num_experts_per_tok is 4; want no more than there are experts"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
            | {"quantization_config": {"quant_method": "mxfp4"}},
            "quant_method is 'mxfp4'; supported for qwen3: all but mxfp4",
        ),
    ],
)
def test_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings({**GPT_OSS, **fields})
