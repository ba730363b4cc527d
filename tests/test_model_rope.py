"""How positions turn heads: read from a config.json as transformers reads it, refused where it would be another way."""

import math

import pytest
import torch

from checkpoints import checkpoint, reference_model
from families import FAMILIES
from llama_fields import LLAMA
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.rope import rotary_table

WITHOUT_POSITIONS = ("granite-h", "nemotron-h")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_POSITIONS])
def test_rotary_table_agrees_with_transformers(family: str) -> None:
    path = checkpoint(family)
    config = parse_config(read_config_json(path))
    positions = torch.arange(300)
    theirs = reference_model(path)
    kinds = theirs.config.layer_types if family.startswith(("gemma3", "gemma4", "olmo3")) else [None]
    for (rope, dim), kind in zip(config.turns, kinds, strict=False):
        of_kind = [] if kind is None else [kind]
        with torch.inference_mode():  # as others ask it, which may change it
            turned = theirs.model.rotary_emb(torch.zeros(1), positions[None], *of_kind)
        cos, sin = (turned.real, turned.imag) if torch.is_tensor(turned) else turned
        table_PR = rotary_table(rope or config.rope, dim, 300, torch.device("cpu"))
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


def test_old_and_new_spelling_of_rope_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    oldest = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = parse_config({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old.rope == oldest.rope == new.rope
    assert new.rope.theta == 5e5


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
