"""What is read of Gemma 4's config.json: a public one, both ways to say which layers have other heads, refusals."""

import logging
from typing import Any

import pytest
import torch

from gemma4_fields import whole
from tercet.model.blocks import Heads, LayerInputs
from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config
from tercet.model.text_part import text_part_of


def read(name: str, **text: Any) -> ModelConfig:
    return parse_config(text_part_of(whole(name, **text)))


def test_the_dense_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read("31B")
    assert not caplog.text
    few, many = Heads(16, 256), Heads(4, 512, keys_are_values=True)
    assert config.layer_heads == ((few,) * 5 + (many,)) * 10
    assert config.layer_windows == ((1024,) * 5 + (0,)) * 10
    assert (config.attention_scale, config.logit_softcap, config.norm_shift) == (1.0, 30.0, 0.0)
    assert (config.value_norm, config.layer_scales, config.qk_norm) == (True,) * 3
    assert config.norms.behind_attention
    # Keys and values: of 50 layers 16 heads of 256, of 10 layers 4 of 512.
    assert config.kv_bytes_per_page(64, torch.bfloat16, 1) == 2 * 2 * 64 * (50 * 16 * 256 + 10 * 4 * 512)
    assert config.kv_bytes_per_page(64, torch.bfloat16, 8) == 2 * 2 * 64 * (50 * 2 * 256 + 10 * 1 * 512)
    assert config.cache_shapes(3, 64, 1)[4:6] == [(2, 3, 16, 64, 256), (2, 3, 4, 64, 512)]
    config.check_tensor_parallel(8)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size is 3"):
        config.check_tensor_parallel(3)


def test_the_one_with_experts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read("26B-A4B")
    assert not caplog.text
    assert config.experts is not None
    assert (config.experts.count, config.experts.each, config.experts.intermediate_size) == (128, 8, 704)
    assert (config.experts.normed, config.experts.beside, config.experts.shared) == (True, True, 0)
    assert config.experts.layers == frozenset(range(30))
    assert config.has_mlp(3)
    assert config.intermediate_size == 2112
    config.check_tensor_parallel(16)
    with pytest.raises(ValueError, match=r"top_k_experts is 129; want no more than there are experts \(128\)"):
        read("26B-A4B", top_k_experts=129)
    with pytest.raises(ValueError, match="num_experts is missing"):
        read("26B-A4B", num_experts=None)


@pytest.mark.parametrize(("name", "first", "twice"), [("E2B", 15, True), ("E4B", 24, False)])
def test_the_small_ones(name: str, first: int, twice: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read(name)
    assert not caplog.text
    count = config.num_kv_heads
    assert [heads.borrowed for heads in config.layer_heads] == [layer >= first for layer in range(config.num_layers)]
    assert {(heads.count, heads.dim, heads.keys_are_values) for heads in config.layer_heads} == {
        (count, 256, False), (count, 512, False)
    }  # fmt: skip
    # What is borrowed is the last layer's of its kind.
    last_far = max(layer for layer in range(first) if not config.layer_windows[layer])
    last_near = max(layer for layer in range(first) if config.layer_windows[layer])
    assert config.cache_places == [
        layer if layer < first else last_near if window else last_far
        for layer, window in enumerate(config.layer_windows)
    ]
    num_far = sum(not window for window in config.layer_windows[:first])
    numbers = count * ((first - num_far) * 256 + num_far * 512)
    assert config.kv_bytes_per_page(64, torch.bfloat16, 1) == 2 * 2 * 64 * numbers
    assert [config.mlp_size(heads) for heads in config.layer_heads[first - 1 : first + 1]] == [
        config.intermediate_size, config.intermediate_size * (2 if twice else 1)
    ]  # fmt: skip
    assert config.layer_inputs == LayerInputs(256, config.num_layers)


def test_layers_with_other_heads_are_named_one_by_one() -> None:
    """As newer versions of transformers write them."""
    own = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    assert read("31B", per_layer_config=own, global_head_dim=None) == read("31B")
    some = read("31B", per_layer_config={"5": {"head_dim": 320}})
    assert some.layer_heads[4:6] == (Heads(16, 256), Heads(16, 320, keys_are_values=True))


def test_silence() -> None:
    """Sizes of what sees everything, and that each sixth layer does, and the last."""
    raw = whole("31B", num_hidden_layers=8)
    for name in ("global_head_dim", "num_global_key_value_heads", "layer_types", "rope_parameters", "sliding_window"):
        del raw["text_config"][name]
    config = parse_config(text_part_of(raw))
    assert config.layer_windows == (*(512,) * 5, 0, 512, 0)
    assert config.layer_heads[5] == Heads(16, 512, keys_are_values=True)
    assert read("31B", attention_k_eq_v=False).layer_heads[5] == Heads(16, 512)
    assert config.layer_ropes == read("31B").layer_ropes[:7] + read("31B").layer_ropes[5:6]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"layer_types": ["sliding_attention"] * 60}, "layer_types ends with 'sliding_attention'"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1; want a whole number"),
        ({"num_kv_shared_layers": 60}, "num_kv_shared_layers is 60; want fewer than there are layers"),
        ({"num_kv_shared_layers": 55}, "num_kv_shared_layers is 55; want fewer than there are layers, ahead of which"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9;"),
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input is -8; want a positive whole number"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"per_layer_config": {"full_attention": {"head_dim": 3}}}, "want an object with numbers of layers"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "per_layer_config of layer 5 is"),
        ({"per_layer_config": {"5": {"head_dim": 0}}}, "head_dim is 0; want a positive whole number"),
        ({"num_global_key_value_heads": 5}, r"want a multiple of num_key_value_heads \(5\)"),
        ({"global_head_dim": 511}, "head_dim is 511; want an even number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "odd"}, "sliding_attention": {}}}, "rope_type is 'odd'"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "proportional"}}},
            "rope_type is 'proportional'; supported: default",
        ),
    ],
)
def test_refusals(text: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read("31B", **text)
