"""Families whose queries grow with their position: read as transformers reads them, and no sooner than they do."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Ministral3Config

from checkpoints import checkpoint, random_prompts
from hub_mistral import MINISTRAL_3_8B, MISTRAL_MEDIUM_3_5, MISTRAL_SMALL_4
from llama_fields import LLAMA
from paged_sequences import Sequences, make_decoder
from tercet.model.checkpoint import parse_settings
from tercet.model.config_json import parse_config
from tercet.model.decoder import Decoder
from tercet.model.rope import query_scales, rotary_table
from tercet.model.vision_reader import read_vision_config
from weight_sizes import num_in_matrices

CPU = torch.device("cpu")
PUBLIC = {
    "ministral-3-8b": MINISTRAL_3_8B,
    "mistral-medium-3.5": MISTRAL_MEDIUM_3_5,
    "mistral-small-4": MISTRAL_SMALL_4,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
SMALL: dict[str, Any] = {
    **LLAMA, "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": YARN,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_what_public_files_say_is_known(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = PUBLIC[name]
    ours, quantization = parse_settings(raw)
    assert quantization is not None
    assert (quantization.is_fp8, quantization.block) == (True, None)
    plain = {key: value for key, value in copy.deepcopy(raw).items() if key != "quantization_config"}
    theirs = AutoConfig.for_model(**plain)
    assert read_vision_config(tmp_path, plain) is not None
    assert not caplog.records
    text = theirs.text_config
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(theirs).model.language_model
        matrices = [parameter.numel() for parameter in model.parameters() if parameter.ndim > 1]
    assert num_in_matrices(ours) == sum(matrices) + text.vocab_size * text.hidden_size
    cos, sin = rotary_table(ours.rope, ours.turning_dim(), 300, CPU).chunk(2, 1)
    their_cos, their_sin = type(model.rotary_emb)(text)(torch.zeros(1), torch.arange(300)[None])
    torch.testing.assert_close(cos, their_cos[0, :, : cos.shape[1]], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, their_sin[0, :, : sin.shape[1]], rtol=0, atol=1e-6)
    assert ours.attention_scale == pytest.approx(model.layers[0].self_attn.scaling, rel=1e-12)
    assert ours.rope.query_growth == text.rope_parameters["llama_4_scaling_beta"]


def test_silence_means_what_it_means_to_transformers() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8}
    theirs = Ministral3Config(**sizes).to_dict()
    silent = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", **sizes}
    assert parse_config(silent) == parse_config({**theirs, **silent, "dtype": None})


def test_queries_grow_behind_the_first_tokens_alone() -> None:
    rope = parse_settings(MINISTRAL_3_8B)[0].rope
    assert query_scales(rope, 16384, CPU) is None
    assert query_scales(None, 20000, CPU) is None
    scales_P = query_scales(rope, 50000, CPU)
    assert scales_P is not None
    assert torch.equal(scales_P[:16384], torch.ones(16384))
    for first, times in ((16384, 1), (32768, 2), (49152, 3)):
        expected = torch.tensor(1 + 0.1 * math.log(1 + times))
        torch.testing.assert_close(scales_P[first : first + 800], expected.expand(800))
    still = parse_settings(MISTRAL_MEDIUM_3_5)[0].rope
    assert query_scales(still, 50000, CPU) is None


def test_what_is_served_without_growth_says_the_same() -> None:
    """Up to the length of training."""
    (ids,) = random_prompts(1, 8, 8, seed=6)
    long = make_decoder(checkpoint("ministral3"))
    short = Decoder(long.config, long.weights, long.group, max_model_len=8)
    assert torch.equal(*(Sequences(decoder, 1).step({}, {0: ids}) for decoder in (long, short)))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "default"}, "rope_type is 'default', but queries grow; supported then: yarn"),
        ({**YARN, "llama_4_scaling_beta": None}, "llama_4_scaling_beta is None; want 0 or a number over 0"),
        ({**YARN, "llama_4_scaling_beta": -0.1}, "llama_4_scaling_beta is -0.1; want 0 or a number over 0"),
        ({**YARN, "max_position_embeddings": 300}, "another max_position_embeddings; want 512"),
    ],
)
def test_refuses_by_name(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**SMALL, "rope_parameters": rope})


SMALL_4 = MISTRAL_SMALL_4["text_config"] | {"architectures": ["Mistral4ForCausalLM"]}
SHARE = {**SMALL_4["rope_parameters"], "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 8}, "n_group is 8, which would change the result; supported: 1"),
        ({"n_group": None}, "n_group is None, which would change the result; supported: 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', which would change the result"),
        ({"rope_parameters": SHARE}, r"partial_rotary_factor is 0.25; want that of qk_rope_head_dim \(64\)"),
    ],
)
def test_refuses_of_latents_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**SMALL_4, **fields})


def test_other_families_know_no_growth() -> None:
    with pytest.raises(ValueError, match=r"hold \['llama_4_scaling_beta'\], which this type does not know"):
        parse_config({**SMALL, "architectures": ["MistralForCausalLM"], "model_type": "mistral"})
    with pytest.raises(ValueError, match=r"llama_4_scaling is .*, which would change the result"):
        parse_config({**SMALL, "llama_4_scaling": {"beta": 0.1}})
