"""A checkpoint's config.json: read as transformers reads it, refused where it would change the result."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import checkpoints
from checkpoints import FAMILIES, checkpoint, reference_model
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.rope import rotary_table
from weight_sizes import num_in_matrices

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 419,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(family: str) -> None:
    path = checkpoint(family)
    ours, theirs = parse_config(read_config_json(path)), AutoConfig.from_pretrained(path)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    layers = reference_model(path).model.layers
    assert [rope is not None for rope in ours.layer_ropes] == [
        bool(getattr(layer.self_attn, "use_rope", True)) for layer in layers
    ]
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    if ours.family in ("mistral", "phi3"):
        windows = [theirs.sliding_window] * len(layers)
    assert list(ours.layer_windows) == [window or 0 for window in windows]


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_table_agrees_with_transformers(family: str) -> None:
    path = checkpoint(family)
    config = parse_config(read_config_json(path))
    positions = torch.arange(300)
    cos, sin = reference_model(path).model.rotary_emb(torch.zeros(1), positions[None])
    table_PR = rotary_table(config.rope, config.head_dim, 300, torch.device("cpu"))
    half = table_PR.shape[1] // 2
    torch.testing.assert_close(table_PR[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table_PR[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("num_positions", "kind"), [(8, "short"), (9, "long")])
def test_longrope_goes_by_the_length_that_is_served(num_positions: int, kind: str) -> None:
    raw = read_config_json(checkpoint("phi3-long"))
    factors = torch.tensor(raw["rope_parameters"][f"{kind}_factor"])
    table_PR = rotary_table(parse_config(raw).rope, 16, num_positions, torch.device("cpu"))
    scale = (1 + math.log(512 / 8) / math.log(8)) ** 0.5
    turned_F = torch.arange(num_positions)[:, None] / (factors * 10_000 ** (torch.arange(6) / 6))
    torch.testing.assert_close(table_PR[:, :6], turned_F.cos() * scale)


@pytest.mark.parametrize(
    "architecture",
    ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM"],
)
def test_silent_fields_mean_what_transformers_assumes(architecture: str, tmp_path: Path) -> None:
    family = architecture.removesuffix("ForCausalLM").lower()
    needed = {name: LLAMA[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    raw = {**needed, "architectures": [architecture], "model_type": family, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = parse_config(read_config_json(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.layer_windows == ((4096 if family == "mistral" else 0),) * 3


def test_old_and_new_spelling_of_rope_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    oldest = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = parse_config({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old.rope == oldest.rope == new.rope
    assert new.rope.theta == 5e5


def test_null_fields_count_as_absent() -> None:
    nulls = dict.fromkeys(["rope_scaling", "head_dim", "sliding_window", "quantization_config", "num_key_value_heads"])
    config = parse_config({**LLAMA, **nulls})
    assert config.head_dim == 16
    assert config.num_kv_heads == config.num_heads


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"]
)
def test_null_key_value_heads_are_as_many_as_heads(architecture: str, tmp_path: Path) -> None:
    family = architecture.removesuffix("ForCausalLM").lower()
    raw = {**LLAMA, "architectures": [architecture], "model_type": family, "num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = parse_config(read_config_json(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_rope_layer_interval", 0),
        ("no_rope_layers", [1, 1]),
        ("no_rope_layers", [1, 2, 0]),
        ("no_rope_layers", "none"),
        ("layer_types", ["sliding_attention"] * 3),
    ],
)
def test_refuses_layers_that_are_not_known(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        parse_config({**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", name: value})


@pytest.mark.parametrize(("factor", "words"), [(0.1, "turns 1 of 16"), (1.5, "is 1.5; want"), ("x", "is 'x'")])
def test_refuses_a_part_of_a_head_that_cannot_turn(factor: object, words: str) -> None:
    phi = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": factor}
    with pytest.raises(ValueError, match=f"partial_rotary_factor {words}"):
        parse_config(phi)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("architectures", None),
        ("architectures", [["LlamaForCausalLM"]]),
        ("architectures", ["LlamaForCausalLM", "LlamaForCausalLM"]),
        ("model_type", "qwen2"),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("partial_rotary_factor", 0.5),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("rope_interleaved", True),
        ("no_rope_layers", [1, 0, 1]),
        ("num_experts", 8),
        ("residual_multiplier", 0.2),
        ("layer_types", ["sliding_attention"] * 3),
        ("layer_types", ["chunked_attention"] * 3),
        ("layer_types", ["full_attention"]),
        ("layer_types", [["full_attention"]] * 3),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 63),
        ("head_dim", 15),
        ("rope_theta", 0),
        ("rope_theta", -5.0),
        ("rope_theta", [1e6]),
        ("original_max_position_embeddings", "x"),
        ("original_max_position_embeddings", 0),
        ("vocab_size", None),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "no"),
        ("torch_dtype", "float8_e4m3fn"),
    ],
)
def test_refuses_by_name(name: str, value: object) -> None:
    raw = {**LLAMA, name: value}
    if name == "vocab_size":
        raw["vocab_size"] = -1
    with pytest.raises(ValueError, match=name.removeprefix("torch_")):
        parse_config(raw)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0]}, "long_factor has 1 numbers"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7}, "long_factor is None; want a list of numbers"),
        ({"rope_type": "su", "short_factor": [0.0] * 8, "long_factor": [2.0] * 8}, "short_factor is"),
        ({"rope_type": "proportional"}, "rope_type is 'proportional'"),
        ({"rope_type": "linear"}, "factor is None"),
        ({"rope_type": "linear", "factor": "four"}, "factor is 'four'"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0; want a number over 0"),
        ({"rope_type": "linear", "factor": -2.0}, r"factor is -2\.0"),
        ({"rope_type": "dynamic", "factor": -1}, "factor is -1"),
        ({"rope_type": "yarn", "factor": 0.0}, r"factor is 0\.0"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0; want"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "beta_fast is -1; want 0 or a number over 0"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1}, "attention_factor is -1"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "false"}, "truncate is 'false'; want true or false"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta is 0; want a number over 1"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, r"rope_theta is 1\.0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0, "high_freq_factor": 4.0}, "low_freq_factor is 0"),
        ({"rope_type": ["linear"], "factor": 2.0}, r"rope_type is \['linear'\]"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
    ],
)
def test_refuses_rope(rope: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_config({**LLAMA, "rope_parameters": rope})


def test_refuses_a_first_windowed_layer_that_is_no_number() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
    with pytest.raises(ValueError, match="max_window_layers is 'x'; want a whole number"):
        parse_config({**qwen, "max_window_layers": "x"})


def test_fields_that_nobody_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_config({**LLAMA, "frobnicate": 3, "use_cache": True})
    assert "frobnicate" in caplog.text
    assert "use_cache" not in caplog.text


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("Llama", {"sliding_window": 64}, "sliding_window"),
        ("Llama", {"sliding_window": 64, "frobnicate": 3}, "frobnicate, sliding_window"),
        ("Llama", {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}, ""),
        ("Mistral", {"sliding_window": 64, "use_sliding_window": False}, "use_sliding_window"),
        ("Mistral", {"sliding_window": 64, "mlp_bias": False}, ""),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": False, "attention_bias": True}, "attention_bias"),
        ("Qwen3", {"attention_bias": True, "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_fields_of_other_families_are_named(
    family: str, fields: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {**LLAMA, "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), **fields}
    with caplog.at_level(logging.WARNING):
        parse_config(raw)
    lines = [f"config.json: fields without meaning for {family.lower()}, which are not used: {named}"] if named else []
    assert caplog.messages == lines


@pytest.mark.parametrize(("content", "words"), [("{", "not readable as JSON"), ("[]", "want an object")])
def test_unreadable_config(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_config_json(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config_json(tmp_path)


def test_context_length() -> None:
    assert parse_config(LLAMA).resolve_max_model_len(None) == 512
    assert parse_config(LLAMA).resolve_max_model_len(100) == 100
    with pytest.raises(ValueError, match=r"--max-model-len is 513; this checkpoint allows 512"):
        parse_config(LLAMA).resolve_max_model_len(513)
    linear = parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.resolve_max_model_len(None) == 2048
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse_config({**LLAMA, "rope_parameters": yarn}).resolve_max_model_len(None) == 2048
    dynamic = parse_config({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    with pytest.raises(ValueError, match="dynamic rope scaling"):
        dynamic.resolve_max_model_len(513)


def test_shares_of_ranks() -> None:
    config = parse_config(LLAMA)
    for size in (1, 2, 4):
        config.check_tensor_parallel(size)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size is 3; want a divisor of num_attention_heads \(4\)"):
        config.check_tensor_parallel(3)
    assert [config.kv_heads_per_rank(size) for size in (1, 2, 4)] == [2, 1, 1]
    assert [config.vocab_per_rank(size) for size in (1, 2, 4)] == [419, 210, 105]
    # 2 (k and v) x 3 layers x 1 head x 64 tokens x 16 numbers x 4 bytes
    assert config.kv_bytes_per_page(64, torch.float32, 2) == 2 * 3 * 64 * 16 * 4


def test_sizes_are_those_of_the_model() -> None:
    path = checkpoints.checkpoint("llama")
    config = parse_config(read_config_json(path))
    matrices = sum(p.numel() for p in reference_model(path).parameters() if p.ndim == 2)
    assert num_in_matrices(config) == matrices
