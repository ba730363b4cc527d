"""Models of which layers carry a state: what their config.json says, how their files name and stack tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5Config

from checkpoints import checkpoint, random_prompts, randomize, reference_model
from families import SHAPE
from families_delta import OF_DELTA
from loaded_weights import check_same, load
from paged_sequences import Sequences, make_decoder
from shapes_delta import SHAPES
from tercet.model.blocks import Delta
from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from weight_sizes import num_in_matrices

CPU = torch.device("cpu")


def agree(ours: ModelConfig, model: Any) -> None:
    """With a model of transformers."""
    delta = ours.carried
    assert isinstance(delta, Delta)
    carries = {index for index, layer in enumerate(model.model.layers) if hasattr(layer, "linear_attn")}
    assert delta.layers == carries
    for layer in (model.model.layers[index].linear_attn for index in carries):
        assert (delta.key_heads, delta.value_heads) == (layer.num_k_heads, layer.num_v_heads)
        assert (delta.key_dim, delta.value_dim) == (layer.head_k_dim, layer.head_v_dim)
        assert layer.conv1d.weight.shape == (delta.channels, 1, delta.taps)
        assert delta.by_key_heads == hasattr(layer, "in_proj_qkvz")
        assert layer.layer_norm_epsilon == ours.rms_norm_eps
    for index, layer in enumerate(model.model.layers):
        if index not in carries:
            assert layer.self_attn.q_proj.weight.shape == (2 * ours.num_heads * ours.head_dim, ours.hidden_size)
            assert ours.attention_scale == layer.self_attn.scaling
        assert (ours.experts_of(index) is not None) == hasattr(layer.mlp, "experts")
    assert ours.rope.rotary_dim(ours.head_dim) == 2 * len(model.model.rotary_emb.inv_freq)
    assert ours.gated_attention
    in_matrices = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not name.endswith(("conv1d.weight", "shared_expert_gate.weight"))
    )
    assert num_in_matrices(ours) == in_matrices


@pytest.mark.parametrize("family", OF_DELTA)
def test_agrees_with_transformers(family: str) -> None:
    path = checkpoint(family)
    agree(parse_config(read_config_json(path)), reference_model(path))


@pytest.mark.parametrize("name", SHAPES)
def test_what_public_files_say_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = parse_config({**SHAPES[name], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False})
    assert not caplog.records
    with torch.device("meta"):
        agree(ours, AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name])))
    assert ours.dtype == torch.bfloat16
    assert ours.rope.theta == 1e7
    assert ours.rope.rotary_dim(ours.head_dim) == 64


@pytest.mark.parametrize("family", OF_DELTA)
def test_silence_means_what_it_means_to_transformers(family: str) -> None:
    kind, _ = OF_DELTA[family]
    (architecture,) = read_config_json(checkpoint(family))["architectures"]
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    if family != "qwen3.5-moe":
        sizes["intermediate_size"] = 96
    ours = parse_config({"architectures": [architecture], "model_type": kind.model_type, **sizes})
    theirs = kind(**sizes)
    with torch.device("meta"):
        agree(ours, AutoModelForCausalLM.from_config(theirs))
    assert (ours.vocab_size, ours.rms_norm_eps) == (theirs.vocab_size, theirs.rms_norm_eps)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"linear_num_value_heads": 5}, r"linear_num_value_heads is 5; want a multiple of linear_num_key_heads \(2\)"),
        ({"linear_key_head_dim": 24}, "linear_key_head_dim is 24; supported: 16, 32, 64 and 128"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; supported: 2 to 8"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has no full_attention"),
        ({"layer_types": ["linear_attention"]}, "layer_types is .*; want linear_attention or full_attention for each"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is .*; want linear_attention or full_attention"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval is 0"),
    ],
)
def test_refuses(fields: dict[str, Any], message: str) -> None:
    raw = read_config_json(checkpoint("qwen3.5"))
    with pytest.raises(ValueError, match=message):
        parse_config({**raw, **fields})


def test_layers_that_guess_are_left_out(tmp_path: Path) -> None:
    path = checkpoint("qwen3.5")
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    check_same(load(path), load(tmp_path))


@pytest.mark.parametrize("size", [1, 2])
def test_experts_may_lie_in_one_tensor(size: int, tmp_path: Path) -> None:
    """As Qwen's files have them; transformers writes each by itself."""
    path = checkpoint("qwen3.5-moe")
    tensors = load_file(path / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        block = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            torch.stack([tensors[f"{block}{index}.{name}_proj.weight"] for index in range(6)])
            for name in ("gate", "up", "down")
        )
        stacked |= {f"{block}gate_up_proj": torch.cat((gates, ups), 1), f"{block}down_proj": downs}
    assert len(stacked) < len(tensors)
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    for rank in range(size):
        check_same(load(path, rank=rank, size=size), load(tmp_path, rank=rank, size=size))


def test_the_language_model_of_one_that_sees(tmp_path: Path) -> None:
    _, settings = OF_DELTA["qwen3.5"]
    eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    text = {**SHAPE, **settings, "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    config = Qwen3_5Config(text_config=text, vision_config=eyes)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(whole, torch.Generator().manual_seed(3))
    whole.save_pretrained(tmp_path)
    (ids,) = random_prompts(1, 40, 40, seed=9)
    with torch.inference_mode():
        wanted_TV = whole(input_ids=torch.tensor([ids])).logits[0]
    run = Sequences(make_decoder(tmp_path), 1)
    assert run.decoder.config.rope.theta == 1e6
    got = [run.step({}, {0: ids[:-3]})[0], *(run.step({0: token}, {})[0] for token in ids[-3:])]
    wanted = wanted_TV[-4:]
    torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_what_states_do_not_go_with() -> None:
    opened = open_for(checkpoint("qwen3.5"), CPU)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size is 4; want a divisor of linear_num_key_heads \(2\)"):
        load_decoder(opened, Group(0, 4, CPU))
