"""What is read of GLM-4's config.json: public ones, what transformers assumes of silence, what is refused."""

import logging
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hub_glm import GLM_4_9B, GLM_4_9B_CHAT, GLM_4_32B, YARN
from tercet.model.blocks import Norms
from tercet.model.config_json import parse_config
from tercet.model.weights import expected_shapes

_AROUND = Norms(behind_attention="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm")


@pytest.mark.parametrize("raw", [GLM_4_9B_CHAT, GLM_4_9B, GLM_4_32B, {**GLM_4_32B, "rope_scaling": YARN}])
def test_public_files(raw: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """All that they say is known, and asks for the tensors that transformers has."""
    with caplog.at_level(logging.WARNING):
        config = parse_config(raw)
    assert not caplog.messages
    assert (config.head_dim, config.rope.rotary_dim(config.head_dim), config.turns_in_pairs) == (128, 64, True)
    assert (config.qkv_bias, config.o_bias) == (raw["attention_bias"], False)
    assert config.norms == (Norms() if raw is GLM_4_9B_CHAT else _AROUND)
    assert config.resolve_max_model_len(None) == (131072 if "rope_scaling" in raw or raw is GLM_4_9B_CHAT else 32768)
    own = {name: value for name, value in raw.items() if name not in ("model_type", "torch_dtype")}
    theirs = AutoConfig.for_model(raw["model_type"], **own)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    assert expected_shapes(config) == {name: tuple(one.shape) for name, one in model.state_dict().items()}


@pytest.mark.parametrize(("architecture", "family"), [("GlmForCausalLM", "glm"), ("Glm4ForCausalLM", "glm4")])
def test_silence_means_what_it_means_to_transformers(architecture: str, family: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = AutoConfig.for_model(family, **sizes)
    ours = parse_config({"architectures": [architecture], "model_type": family, **sizes})
    assert (ours.vocab_size, ours.rms_norm_eps) == (theirs.vocab_size, theirs.rms_norm_eps)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.max_position_embeddings, ours.qkv_bias) == (theirs.max_position_embeddings, theirs.attention_bias)
    assert (ours.rope.turned, ours.rope.theta) == (
        theirs.rope_parameters["partial_rotary_factor"],
        theirs.rope_parameters["rope_theta"],
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; want 1.0 at most"),
        ({"head_dim": 10, "partial_rotary_factor": 0.5}, "partial_rotary_factor turns 5 of 10 numbers"),
        ({"layer_types": ["sliding_attention"] * 40}, "supported for glm4: full_attention throughout"),
        ({"architectures": ["ChatGLMModel"]}, "architectures is"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**GLM_4_9B, **changed})
