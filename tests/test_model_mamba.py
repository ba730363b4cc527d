"""Models with Mamba-2 layers: what their config.json says, how ranks share them, and what they do not go with."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import checkpoint, reference_model
from families_mamba import OF_MAMBA
from shapes_mamba import SHAPES
from tercet.model.adapters import ranks_of
from tercet.model.blocks import Mamba
from tercet.model.checkpoint import parse_settings
from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.states import check_for_gpu, make_states
from weight_sizes import num_in_matrices

CPU = torch.device("cpu")


def agree_by_blocks(ours: ModelConfig, model: Any) -> None:
    """With one of transformers whose layers are blocks, of which one here has one or two."""
    mixers: list[Any] = []
    seconds: dict[int, Any] = {}
    for layer in model.model.layers:
        if layer.block_type in ("mlp", "moe"):
            seconds[len(mixers) - 1] = layer
        else:
            mixers.append(layer)
    assert len(mixers) == ours.num_layers
    mamba = ours.carried
    assert isinstance(mamba, Mamba)
    assert mamba.layers == {index for index, layer in enumerate(mixers) if layer.block_type == "linear_attention"}
    one = mixers[min(mamba.layers)].mixer
    assert (mamba.key_heads, mamba.value_heads, mamba.key_dim) == (one.n_groups, one.num_heads, one.ssm_state_size)
    assert (mamba.value_dim, mamba.norm_size) == (one.head_dim, one.norm.group_size)
    assert one.conv1d.weight.shape == (mamba.channels, 1, mamba.taps)
    assert tuple(one.time_step_limit) == mamba.time_steps
    assert ours.bare_layers == set(range(ours.num_layers)) - seconds.keys()
    for index, layer in seconds.items():
        assert (ours.experts_of(index) is not None) == (layer.block_type == "moe")
    assert not any(ours.layer_ropes)


def agree(ours: ModelConfig, model: Any) -> None:
    """With a model of transformers."""
    if ours.family == "nemotron_h":
        agree_by_blocks(ours, model)
        return
    carries = {index for index, layer in enumerate(model.model.layers) if getattr(layer, "mamba", None) is not None}
    assert (frozenset() if ours.carried is None else ours.carried.layers) == carries
    for layer in (model.model.layers[index].mamba for index in carries):
        mamba = ours.carried
        assert isinstance(mamba, Mamba)
        assert (mamba.key_heads, mamba.value_heads) == (layer.n_groups, layer.num_heads)
        assert (mamba.key_dim, mamba.value_dim) == (layer.ssm_state_size, layer.head_dim)
        assert layer.conv1d.weight.shape == (mamba.channels, 1, mamba.taps)
        assert mamba.conv_bias == (layer.conv1d.bias is not None)
        assert mamba.norm_size == layer.norm.group_size
        assert tuple(layer.time_step_limit) == mamba.time_steps
    for index, layer in enumerate(model.model.layers):
        if index not in carries:
            assert ours.attention_scale == layer.self_attn.scaling
        assert (ours.experts_of(index) is not None) == (getattr(layer, "block_sparse_moe", None) is not None)
    in_matrices = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not name.endswith("conv1d.weight")
    )
    assert num_in_matrices(ours) == in_matrices


@pytest.mark.parametrize("family", OF_MAMBA)
def test_agrees_with_transformers(family: str) -> None:
    path = checkpoint(family)
    agree(parse_config(read_config_json(path)), reference_model(path))


@pytest.mark.parametrize("name", SHAPES)
def test_what_public_files_say_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = parse_config(SHAPES[name])
    assert not caplog.records
    with torch.device("meta"):
        agree(ours, AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name])))
    assert ours.dtype == torch.bfloat16
    assert isinstance(ours.carried, Mamba)
    check_for_gpu(ours.carried)
    assert not any(ours.layer_ropes)


@pytest.mark.parametrize("given", [[0.25, {"__float__": "Infinity"}], [0.25, math.inf]])
def test_time_steps(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ours = parse_config({**read_config_json(checkpoint("granite-h")), "time_step_limit": given})
    assert isinstance(ours.carried, Mamba)
    assert ours.carried.time_steps == (0.25, math.inf)
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"normalization_function": "layernorm"}, "normalization_function is 'layernorm'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; supported: rope, nope"),
        ({"mamba_n_groups": 3}, r"mamba_n_heads is 4; want a multiple of mamba_n_groups \(3\)"),
        ({"mamba_d_head": 24}, r"mamba_d_head is 24; want mamba_expand times hidden_size \(128\) over mamba_n_heads"),
        ({"mamba_d_state": 24}, "a Mamba state's size is 24; supported: 16, 32, 64, 128 and 256"),
        ({"mamba_n_heads": 16, "mamba_d_head": 8}, "a Mamba head's size is 8; want a multiple of 16"),
        ({"mamba_d_conv": 9}, "Mamba's convolution has 9 taps; supported: 2 to 8"),
        ({"layer_types": ["mamba"] * 3}, "layer_types has no attention; want one at least"),
        ({"layer_types": ["mamba"]}, "layer_types is .*; want mamba or attention for each of 3 layers"),
        ({"layer_types": None}, "layers_block_type is None; want mamba or attention for each of 3 layers"),
        ({"time_step_limit": [2, 1]}, r"time_step_limit is \[2, 1\]; want two numbers, the lesser one first"),
        ({"shared_intermediate_size": 72}, r"shared_intermediate_size is 72; want a multiple of intermediate_size"),
    ],
)
def test_refuses(fields: dict[str, Any], message: str) -> None:
    raw = read_config_json(checkpoint("granite-h"))
    with pytest.raises(ValueError, match=message):
        parse_config({**raw, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        ({"use_bias": True}, "use_bias is True"),
        ({"moe_latent_size": 32}, "moe_latent_size is 32"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type is .*; supported: mamba, attention, mlp, moe"),
        ({"layers_block_type": ["mamba", "mlp", "moe"]}, "layers_block_type has moe as block 2, behind mlp; supported"),
        ({"layers_block_type": None, "hybrid_override_pattern": "-M*"}, "hybrid_override_pattern has mlp as block 0"),
        ({"moe_shared_expert_intermediate_size": 60}, "moe_shared_expert_intermediate_size is 60; want a multiple"),
    ],
)
def test_refuses_blocks(fields: dict[str, Any], message: str) -> None:
    raw = read_config_json(checkpoint("nemotron-h"))
    with pytest.raises(ValueError, match=message):
        parse_config({**raw, **fields})


def test_what_they_do_not_go_with(tmp_path: Path) -> None:
    ours = parse_config(read_config_json(checkpoint("granite-h-dense")))
    with pytest.raises(ValueError, match="--adapter: models of family granitemoehybrid with Mamba layers take none"):
        ranks_of([], ours)
    raw = {**SHAPES["granite-4.0-h-tiny"], "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ValueError, match="quant_method is 'fp8'; supported for granitemoehybrid: none"):
        parse_settings(raw)
    assert isinstance(ours.carried, Mamba)
    with pytest.raises(ValueError, match="the size of a Mamba state is 16; supported on a GPU: 128, 256"):
        check_for_gpu(ours.carried)


def test_ranks() -> None:
    small = parse_config(SHAPES["granite-4.0-h-small"])
    for size in (2, 8):
        small.check_tensor_parallel(size)
        states = make_states(small, 3, torch.bfloat16, torch.device("meta"), size)
        assert states is not None
        assert states.states_LSHDV.shape == (36, 3, 128 // size, 128, 64)
        assert states.tails_LSTC.shape == (36, 3, 3, 256 + 8192 // size)
    dense = parse_config(
        {**read_config_json(checkpoint("granite-h-dense")), "num_attention_heads": 12, "mamba_n_groups": 4}
    )
    with pytest.raises(ValueError, match="--tensor-parallel-size is 3; want a divisor of the number of Mamba's heads"):
        dense.check_tensor_parallel(3)
