"""Families whose heads are turned or normed in ways of their own: read as transformers reads them, refused by name."""

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import make_checkpoint
from hub_turning import (
    APERTUS,
    ARCEE,
    ERNIE_4_5_A3B,
    ERNIE_4_5_SMALL,
    EXAONE_4_32B,
    EXAONE_4_SMALL,
    HUNYUAN_7B,
    HUNYUAN_A13B,
)
from loaded_weights import load
from tercet.model.checkpoint import parse_settings
from tercet.model.config_json import parse_config
from tercet.model.rope import rotary_table
from weight_sizes import num_in_matrices

PUBLIC = {
    "apertus-8b": APERTUS,
    "afm-4.5b": ARCEE,
    "ernie-4.5-0.3b": ERNIE_4_5_SMALL,
    "ernie-4.5-21b-a3b": ERNIE_4_5_A3B,
    "exaone-4-1.2b": EXAONE_4_SMALL,
    "exaone-4-32b": EXAONE_4_32B,
    "hunyuan-7b": HUNYUAN_7B,
    "hunyuan-a13b": HUNYUAN_A13B,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_public_files_say_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = parse_settings({**PUBLIC[name], "transformers_version": "4.54.0.dev0"})
    assert not caplog.records
    theirs = AutoConfig.for_model(**copy.deepcopy(PUBLIC[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    lm_head = 0 if ours.tie_word_embeddings else ours.vocab_size * ours.hidden_size
    matrices = [parameter.numel() for parameter in model.model.parameters() if parameter.ndim > 1 < len(parameter)]
    assert num_in_matrices(ours) == sum(matrices) + lm_head
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.dtype == torch.bfloat16
    cos, sin = rotary_table(ours.rope, ours.turning_dim(), 300, torch.device("cpu")).chunk(2, 1)
    their_cos, their_sin = type(model.model.rotary_emb)(theirs)(torch.zeros(1), torch.arange(300)[None])
    torch.testing.assert_close(cos, their_cos[0, :, : cos.shape[1]], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, their_sin[0, :, : sin.shape[1]], rtol=0, atol=1e-6)
    sparse = {index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    assert (ours.experts.layers if ours.experts else set()) == sparse


ALPHA = HUNYUAN_7B["rope_scaling"]
SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 32}
SILENT = {"Ernie4_5ForCausalLM": "ernie4_5", "Ernie4_5_MoeForCausalLM": "ernie4_5_moe", "Exaone4ForCausalLM": "exaone4"}
SILENT |= {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
}


@pytest.mark.parametrize("architecture", SILENT)
def test_silence_means_what_it_means_to_transformers(architecture: str) -> None:
    family = SILENT[architecture]
    told = AutoConfig.for_model(family, **SIZES).to_dict()
    silent = {"architectures": [architecture], "model_type": family, **SIZES}
    assert parse_config(silent) == parse_config({**told, **silent, "dtype": None})


def test_layers_that_see_all_have_no_positions_beside_windows() -> None:
    """As EXAONE says it in one of two ways; where there are no windows, all have."""
    listed = parse_config(EXAONE_4_32B)
    silent = {name: value for name, value in EXAONE_4_32B.items() if name != "layer_types"}
    assert parse_config({**silent, "sliding_window_pattern": 4}) == listed
    assert listed.layer_windows == (4096, 4096, 4096, 0) * 16
    assert [rope is None for rope in listed.layer_ropes] == [False, False, False, True] * 16
    whole = parse_config(EXAONE_4_SMALL)
    assert whole.layer_windows == (0,) * 30
    assert whole.layer_ropes == (whole.rope,) * 30
    with pytest.raises(ValueError, match="sliding_window_pattern is 'LLLG'; want a positive whole number"):
        parse_config(silent)
    with pytest.raises(ValueError, match="asks for sliding_attention, but sliding_window is not in use"):
        parse_config({**EXAONE_4_32B, "sliding_window": None})


def test_layers_with_experts_lie_between_two() -> None:
    fields = {"moe_layer_interval": 3, "moe_layer_start_index": 4, "moe_layer_end_index": 20}
    for end, layers in ((20, {5, 8, 11, 14, 17, 20}), (-1, {5, 8, 11, 14, 17, 20, 23, 26}), (99, set(range(5, 28, 3)))):
        experts = parse_config({**ERNIE_4_5_A3B, **fields, "moe_layer_end_index": end}).experts
        assert experts is not None
        assert experts.layers == layers


def test_a_base_is_stretched_once_and_for_all() -> None:
    ours = parse_config(HUNYUAN_7B)
    assert (ours.rope.kind, ours.rope.theta) == ("default", pytest.approx(10_000 * 1000 ** (128 / 126)))
    assert ours.resolve_max_model_len(None) == 32768
    plain = parse_config({**HUNYUAN_7B, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert (plain.rope.kind, plain.rope.theta) == ("dynamic", 10_000)


def test_numbers_of_all_layers_are_one() -> None:
    single = {"moe_topk": 8, "num_shared_expert": 1, "moe_intermediate_size": 3072}
    assert parse_config({**HUNYUAN_A13B, **single}) == parse_config(HUNYUAN_A13B)
    experts = parse_config(HUNYUAN_A13B).experts
    assert experts is not None
    assert (experts.count, experts.each, experts.shared, experts.intermediate_size) == (64, 8, 1, 3072)


def test_names_of_how_many_experts_agree() -> None:
    other = {name: value for name, value in ERNIE_4_5_A3B.items() if name not in ("moe_k", "moe_num_experts")}
    again = {**other, "num_experts_per_tok": 6, "num_experts": 64}
    assert parse_config(again) == parse_config(ERNIE_4_5_A3B) == parse_config(other)
    none = parse_config({**ERNIE_4_5_A3B, "moe_num_shared_experts": 0}).experts
    assert none is not None
    assert none.shared == 0


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (ERNIE_4_5_A3B, {"use_bias": True}, "use_bias is True, which would change the result"),
        (ERNIE_4_5_A3B, {"moe_gate_act": "sigmoid"}, "moe_gate_act is 'sigmoid', which would change the result"),
        (ERNIE_4_5_A3B, {"moe_use_aux_free": False}, "moe_use_aux_free is False, which would change the result"),
        (ERNIE_4_5_A3B, {"moe_norm_min": 0.1}, "moe_norm_min is 0.1, which would change the result"),
        (ERNIE_4_5_A3B, {"num_experts_per_tok": 4}, "moe_k is 6 and num_experts_per_tok is 4; want one number"),
        (ERNIE_4_5_A3B, {"moe_k": 65}, "moe_k is 65; want no more than there are experts"),
        (ERNIE_4_5_A3B, {"moe_layer_start_index": -1}, "moe_layer_start_index is -1; want a whole number"),
        (ERNIE_4_5_A3B, {"moe_layer_end_index": -2}, "moe_layer_end_index is -2; want a whole number"),
        (ERNIE_4_5_A3B, {"moe_layer_interval": 0}, "moe_layer_interval is 0; want a positive whole number"),
        (ERNIE_4_5_A3B, {"moe_num_shared_experts": -1}, "moe_num_shared_experts is -1; want a whole number"),
        (HUNYUAN_7B, {"use_qk_norm": False}, "use_qk_norm is False, which would change the result"),
        (HUNYUAN_7B, {"use_cla": True}, "use_cla is True, which would change the result"),
        (HUNYUAN_7B, {"num_experts": 8}, "num_experts is 8, which would change the result"),
        (HUNYUAN_7B, {"norm_type": "layer"}, "norm_type is 'layer', which would change the result"),
        (HUNYUAN_7B, {"rope_scaling": ALPHA | {"alpha": -1.0}}, "alpha is -1.0; want a number over 0"),
        (HUNYUAN_7B, {"rope_scaling": ALPHA | {"beta": 1.0}}, r"hold \['beta'\], which this type does not know"),
        (HUNYUAN_7B, {"head_dim": 2}, "head_dim is 2; want 4 at least beside an alpha of positions"),
        (HUNYUAN_A13B, {"moe_topk": [8] * 31 + [4]}, r"moe_topk is \[8, .*\]; want one number for all layers"),
        (HUNYUAN_A13B, {"moe_topk": [8] * 31}, r"moe_topk is \[8, .*\]; want one number for all layers"),
        (HUNYUAN_A13B, {"num_shared_expert": 2}, "num_shared_expert is 2; supported: 1"),
        (HUNYUAN_A13B, {"moe_intermediate_size": 1024}, "moe_intermediate_size is 1024; supported: 3072"),
        (HUNYUAN_A13B, {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1, which would change the result"),
        (HUNYUAN_A13B, {"use_mla": True}, "use_mla is True, which would change the result"),
        (APERTUS, {"hidden_act": "silu"}, "hidden_act is 'silu', which would change the result; supported: 'xielu'"),
        (APERTUS, {"post_norm": True}, "post_norm is True, which would change the result"),
        (ARCEE, {"hidden_act": "silu"}, "hidden_act is 'silu', which would change the result; supported: 'relu2'"),
        (ERNIE_4_5_SMALL, {"use_bias": 1}, "use_bias is 1; want true or false"),
    ],
)
def test_refuses_by_name(config: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**config, **fields})


def test_what_guesses_further_tokens_is_left_out(tmp_path: Any) -> None:
    """ERNIE's has names of its own."""
    folder = make_checkpoint("ernie4.5-moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.1.mlp.moe_statics.e_score_correction_bias" in tensors
    save_file({**tensors, "model.mtp_emb_norm.0.weight": torch.ones(64)}, folder / "model.safetensors")
    load(folder)
