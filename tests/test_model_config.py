"""A checkpoint's config.json: read as transformers reads it, refused where it would change the result."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, Olmo3Config

import checkpoints
from checkpoints import checkpoint, reference_model
from families import FAMILIES
from llama_fields import LLAMA
from tercet.model.config_defaults import CLASSIFIERS, HEADLESS
from tercet.model.config_defaults import FAMILIES as ARCHITECTURES
from tercet.model.config_json import parse_config, read_config_json
from weight_sizes import num_in_matrices


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family != "nemotron-h"]
)  # whose blocks are no layers
def test_agrees_with_transformers(family: str) -> None:
    path = checkpoint(family)
    ours, theirs = parse_config(read_config_json(path)), AutoConfig.from_pretrained(path)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_layers == theirs.num_hidden_layers
    if family.startswith("gemma4"):
        heads = [(heads.count, heads.dim) for heads in ours.layer_heads]
        own = theirs.per_layer_config
        assert heads == [(own[n].num_key_value_heads, own[n].head_dim) for n in range(ours.num_layers)]
    elif ours.latent is None:
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    else:
        assert (ours.num_kv_heads, ours.head_dim) == (1, theirs.qk_head_dim)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    model = reference_model(path).model
    attentions = [getattr(layer, "self_attn", None) for layer in model.layers]
    windows = [getattr(attention, "sliding_window", None) for attention in attentions]
    turn = [getattr(attention, "use_rope", getattr(model, "rotary_emb", None) is not None) for attention in attentions]
    if ours.family == "exaone4":
        turn = [attention.is_sliding or attention.sliding_window is None for attention in attentions]
        windows = [attention.sliding_window if attention.is_sliding else None for attention in attentions]
    assert [rope is not None for rope in ours.layer_ropes] == list(map(bool, turn))
    if ours.family in ("mistral", "mixtral", "phi3"):
        windows = [theirs.sliding_window] * len(attentions)
    assert list(ours.layer_windows) == [window or 0 for window in windows]


WANT_A_NUMBER = (
    "Ministral",
    "Mistral",
    "Mixtral",
    "Gemma",
    "Qwen2Moe",
    "Qwen3Moe",
    "Glm",
    "Dots1",
    "Ernie4_5_Moe",
    "Exaone4",
    "MiniMax",
    "GptOss",
    "Qwen3Next",
    "Qwen3_5",
    "GraniteMoeHybrid",
    "NemotronH",
)
HAVE_ONE_HEAD = ("Deepseek", "Youtu", "MiniCPM3")
"""Whatever is said."""


@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if not name.startswith((*WANT_A_NUMBER, *HAVE_ONE_HEAD))]
)
def test_null_key_value_heads_are_as_many_as_heads(architecture: str, tmp_path: Path) -> None:
    family = ARCHITECTURES[architecture]
    raw = {**LLAMA, "architectures": [architecture], "model_type": family, "num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = parse_config(read_config_json(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads == 4


@pytest.mark.parametrize(("ending", "names"), [("Model", HEADLESS), ("ForSequenceClassification", CLASSIFIERS)])
def test_other_heads_are_those_that_transformers_has(ending: str, names: dict[str, str]) -> None:
    inner = {"Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe"}  # of models that also see: what is theirs has longer names
    begin = {name.removesuffix("ForCausalLM") for name in ARCHITECTURES} - inner | {f"{name}Text" for name in inner}
    assert set(names) == {name + ending for name in begin if hasattr(transformers, name + ending)}


GEMMA: dict[str, Any] = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
ROPES = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}


def test_spellings_of_olmo_3_agree() -> None:
    """What is scaled is that of layers that see all; both have the same base."""
    olmo = {**LLAMA, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 5}
    scaled = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    old = parse_config({**olmo, "rope_theta": 5e5, "rope_scaling": scaled})
    both = {"full_attention": {**scaled, "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    types = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    new = {**olmo, "rope_parameters": both, "layer_types": types}
    assert old == parse_config(new) == parse_config({**new, "original_max_position_embeddings": 1024})
    assert [rope.kind for rope in old.layer_ropes if rope] == ["default"] * 3 + ["yarn", "default"]
    theirs = Olmo3Config(**olmo, rope_theta=5e5, rope_scaling=dict(scaled))
    assert theirs.layer_types == types
    assert theirs.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}


def test_spellings_of_gemma_agree() -> None:
    """As before transformers 5, as since then, and with types of layers given."""
    old = parse_config({**GEMMA, "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    new = parse_config({**GEMMA, "rope_parameters": ROPES, "layer_types": ["sliding_attention"] * 3})
    assert old == new
    assert old.rope.theta == 1e6
    assert [rope.theta for rope in old.layer_ropes if rope is not None] == [10_000.0] * 3
    # In this family the number in config.json is that of the scaled length.
    assert old.resolve_max_model_len(None) == 512
    other = parse_config({**GEMMA, "rope_local_base_freq": 5e4, "sliding_window_pattern": 2, "sliding_window": 9})
    assert [rope.theta for rope in other.layer_ropes if rope is not None] == [5e4, 1e6, 5e4]
    assert other.layer_windows == (9, 0, 9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_activation", "gelu"),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", -1.0),
        ("query_pre_attn_scalar", 0),
        ("use_bidirectional_attention", True),
        ("sliding_window", None),
        ("sliding_window_pattern", 0),
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_parameters", {"full_attention": {}}),
        ("rope_parameters", {**ROPES, "sliding_attention": {"rope_type": "odd"}}),
    ],
)
def test_refuses_of_gemma(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="rope_" if name == "rope_parameters" else name):
        parse_config({**GEMMA, name: value})


@pytest.mark.parametrize("value", [0, -1.0, "x", float("inf")])
@pytest.mark.parametrize(
    "name", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
def test_refuses_multipliers_that_are_none(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}; want a number over 0"):
        parse_config({**LLAMA, "architectures": ["GraniteForCausalLM"], "model_type": "granite", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("architectures", None),
        ("architectures", [["LlamaForCausalLM"]]),
        ("architectures", ["LlamaForCausalLM", "LlamaForCausalLM"]),
        ("model_type", "qwen2"),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("rope_interleaved", True),
        ("is_causal", False),
        ("no_rope_layers", [1, 0, 1]),
        ("num_experts", 8),
        ("residual_multiplier", 0.2),
        ("attention_multiplier", 0.2),
        ("logits_scaling", 8.0),
        ("layer_types", ["sliding_attention"] * 3),
        ("layer_types", ["chunked_attention"] * 3),
        ("layer_types", ["full_attention"]),
        ("layer_types", [["full_attention"]] * 3),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 2**40),
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


def test_refuses_a_first_windowed_layer_that_is_no_number() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
    with pytest.raises(ValueError, match="max_window_layers is 'x'; want a whole number"):
        parse_config({**qwen, "max_window_layers": "x"})


def test_fields_that_nobody_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_config({**LLAMA, "frobnicate": 3, "auto_map": {"AutoModel": "modeling.Own"}, "use_cache": True})
    assert "not used: auto_map, frobnicate" in caplog.text
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not readable as JSON"),
        ("[" * 10_000, "not readable as JSON: maximum recursion depth"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "config.json is not readable as JSON: Exceeds the limit"),
        ("[]", "want an object"),
    ],
)
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
    endless = parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 1e14}})
    assert endless.resolve_max_model_len(None) == 2**24
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
    assert [config.heads.of_rank(size) for size in (1, 2, 4)] == [2, 1, 1]
    assert [config.vocab_per_rank(size) for size in (1, 2, 4)] == [419, 210, 105]
    # 2 (k and v) x 3 layers x 1 head x 64 tokens x 16 numbers x 4 bytes
    assert config.kv_bytes_per_page(64, torch.float32, 2) == 2 * 3 * 64 * 16 * 4


def test_sizes_are_those_of_the_model() -> None:
    path = checkpoints.checkpoint("llama")
    config = parse_config(read_config_json(path))
    matrices = sum(p.numel() for p in reference_model(path).parameters() if p.ndim == 2)
    assert num_in_matrices(config) == matrices
