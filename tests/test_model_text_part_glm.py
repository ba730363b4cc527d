"""The language model of GLM's checkpoints that can also see."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Glm4vConfig, Glm4vMoeConfig, Glm46VConfig

from checkpoints import randomize
from families import SHAPE
from hub_glm import GLM_4_1V, GLM_4_5V
from loaded_weights import load, weight_list
from quantized_checkpoints import Way, fp8, quantized
from tercet.model.checkpoint import parse_settings, read_config
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.widen import plain
from test_model_text_part_qwen import check_logits

_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16}
_KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "glm4v": (Glm4vConfig, {}, {"rope_parameters": _YARN}),
    "glm4v-tied": (Glm4vConfig, {}, {"rope_parameters": _ROPE, "tie_word_embeddings": True}),
    "glm4v-moe": (Glm4vMoeConfig, {}, {"rope_parameters": _ROPE, **_EXPERTS}),
    "glm46v-moe": (
        Glm46VConfig,
        {"model_type": "glm4v_moe_vision"},
        {"model_type": "glm4v_moe_text", "rope_parameters": _ROPE, **_EXPERTS},
    ),
}


def make(folder: Path, name: str) -> Any:
    """A folder as transformers writes it."""
    kind, eyes, text = _KINDS[name]
    config = kind(
        text_config={**SHAPE, **text},
        vision_config={**_EYES, **eyes},
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(whole, torch.Generator().manual_seed(3))
    whole.save_pretrained(folder)
    return whole


@pytest.fixture(scope="module", params=_KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make(folder, request.param)


def test_logits_are_those_of_the_whole(model: tuple[Path, Any]) -> None:
    """Of experts there are both kinds: transformers writes those of one whole one by one, of the other as stacks."""
    check_logits(*model)


def test_what_is_silent_is_as_in_transformers(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Every setting but sizes that must be there."""
    raw = json.loads((model[0] / "config.json").read_text())
    text = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    kind = raw["text_config"]["model_type"]
    raw["text_config"] = text | ({"model_type": kind} if raw["model_type"] == "glm46v" else {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = type(model[1].config)(**raw).text_config
    ours = read_config(tmp_path)
    assert (ours.vocab_size, ours.num_kv_heads) == (theirs.vocab_size, theirs.num_key_value_heads)
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.turned == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64)
    assert (ours.qkv_bias, ours.o_bias, ours.qk_norm) == (True, False, False)
    if ours.experts is not None:
        assert (ours.experts.count, ours.experts.each) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
        assert ours.experts.intermediate_size == theirs.moe_intermediate_size


@pytest.mark.parametrize("raw", [GLM_4_1V, GLM_4_5V])
def test_public_files(raw: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, _ = parse_settings(raw)
    assert not caplog.messages
    assert (config.head_dim, config.rope.rotary_dim(128), config.qkv_bias) == (128, 64, True)
    assert config.turns_in_pairs == (config.experts is None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "glm4v_moe"}, "model_type is 'glm4v_moe'; Glm4vForConditionalGeneration wants 'glm4v'"),
        ({"text_config": None}, "text_config is None; Glm4vForConditionalGeneration wants one of"),
        ({"text_config": {"model_type": "glm4"}}, "wants one of model_type 'glm4v_text'"),
        ({"head_dim": 64}, "head_dim is 64; want 128, hidden_size by num_attention_heads"),
        ({"num_attention_heads": 31}, "hidden_size is 4096; want a multiple of num_attention_heads"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    text = changes if changes.keys() <= {"head_dim", "num_attention_heads"} else {}
    raw = {**GLM_4_1V, **({"text_config": {**GLM_4_1V["text_config"], **text}} if text else changes)}
    with pytest.raises(ValueError, match=message):
        parse_settings(raw)


def test_it_may_be_quantized(tmp_path: Path) -> None:
    """What is in FP8 may be kept so, in whatever order rows come."""
    make(tmp_path / "model", "glm4v")
    way = Way({"quant_method": "fp8", "weight_block_size": [16, 64]}, fp8(16, 64))
    stored, meant = quantized(tmp_path / "model", way, tmp_path)
    wanted = weight_list(load(meant))
    for kept in (False, True):
        found = weight_list(load(stored, kept=kept))
        assert any(isinstance(weight, ScaledWeight) for weight in found) == kept
        assert all(torch.equal(plain(ours), theirs) for ours, theirs in zip(found, wanted, strict=True))
