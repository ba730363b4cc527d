"""What a config.json says of latents: read as transformers reads it, refused where it would change the result."""

import copy
import logging
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import checkpoint, reference_model
from hub_latents import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_FLASH, KIMI_K2, MINICPM3, MOONLIGHT, YOUTU
from tercet.model.blocks import Latent
from tercet.model.checkpoint import parse_settings
from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.rope import rotary_table
from weight_sizes import num_in_matrices

TINY = ["deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "mistral4", "glm4-moe-lite", "youtu", "minicpm3"]
PUBLIC = {
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": KIMI_K2,
    "moonlight": MOONLIGHT,
    "glm-4.7-flash": GLM_FLASH,
    "youtu": YOUTU,
    "minicpm3": MINICPM3,
}


def agree(ours: ModelConfig, model: Any) -> None:
    """With the first and the last layer of a model of transformers."""
    latent, theirs = ours.latent, model.config
    assert latent is not None
    assert (ours.num_kv_heads, ours.head_dim) == (1, latent.still + latent.turned)
    assert ours.turning_dim() == latent.turned
    for layer in (model.model.layers[0], model.model.layers[-1]):
        attention = layer.self_attn
        assert attention.kv_a_proj_with_mqa.weight.shape == (latent.dim, ours.hidden_size)
        assert attention.kv_a_layernorm.weight.shape == (latent.rank,)
        assert attention.kv_b_proj.weight.shape == (ours.num_heads * (latent.still + latent.value), latent.rank)
        assert attention.o_proj.weight.shape == (ours.hidden_size, ours.num_heads * latent.value)
        queries = attention.q_b_proj if latent.q_rank else attention.q_proj
        assert queries.weight.shape == (ours.num_heads * ours.head_dim, latent.q_rank or ours.hidden_size)
        assert ours.attention_scale == pytest.approx(attention.scaling, rel=1e-12)
        norms = [attention.kv_a_layernorm] + ([attention.q_a_layernorm] if latent.q_rank else [])
        assert {norm.variance_epsilon for norm in norms} == {latent.eps}
        assert ours.residual_multiplier == getattr(layer, "residual_scale", 1.0)
    assert ours.embedding_multiplier == getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0)
    assert ours.logits_scaling == getattr(theirs, "logits_scaling", 1.0)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.layer_windows, ours.qk_norm, ours.qkv_bias, ours.o_bias) == ((0,) * ours.num_layers, *[False] * 3)
    assert num_in_matrices(ours) == sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    sparse = {index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    if (experts := ours.experts) is None:
        assert not sparse
        return
    router, block = model.model.layers[-1].mlp.gate, model.model.layers[-1].mlp
    assert experts.layers == sparse
    assert (experts.each, experts.scale) == (router.top_k, router.routed_scaling_factor)
    assert block.experts.down_proj.shape == (experts.count, ours.hidden_size, experts.intermediate_size)
    assert block.shared_experts.up_proj.weight.shape[0] == experts.shared * experts.intermediate_size
    assert experts.biased == hasattr(router, "e_score_correction_bias")
    assert experts.scored_in_float32 == (ours.family != "mistral4")
    assert experts.normed == getattr(router, "norm_topk_prob", False)
    limited = router.num_group != router.topk_group and getattr(router, "topk_method", "") != "greedy"
    assert (experts.groups, experts.best_groups) == ((router.num_group, router.topk_group) if limited else (1, 1))


@pytest.mark.parametrize("family", TINY)
def test_agrees_with_transformers(family: str) -> None:
    path = checkpoint(family)
    agree(parse_config(read_config_json(path)), reference_model(path))


@pytest.mark.parametrize("name", PUBLIC)
def test_what_public_files_say_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    raw = PUBLIC[name]
    ours, quantization = parse_settings({**raw, "transformers_version": "4.33.1", "bos_token_id": 0})
    assert not caplog.records
    assert (quantization is not None) == ("quantization_config" in raw)
    plain = {key: value for key, value in copy.deepcopy(raw).items() if key != "quantization_config"}
    if name == "kimi-k2":  # of which transformers has no class
        plain["model_type"] = "deepseek_v3"
    if name == "minicpm3":
        plain["rope_scaling"]["factor"] = 1.0  # as it is; transformers 5.17 wants to be told
    theirs = AutoConfig.for_model(**plain)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    agree(ours, model)
    assert ours.guessing_layers == plain.get("num_nextn_predict_layers", 0)
    assert ours.dtype == torch.bfloat16
    cos, sin = rotary_table(ours.rope, ours.turning_dim(), 300, torch.device("cpu")).chunk(2, 1)
    turned = type(model.model.rotary_emb)(theirs)(torch.zeros(1), torch.arange(300)[None])
    their_cos, their_sin = (turned.real, turned.imag) if torch.is_tensor(turned) else turned
    torch.testing.assert_close(cos, their_cos[0, :, : cos.shape[1]], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, their_sin[0, :, : sin.shape[1]], rtol=0, atol=1e-6)


def test_what_is_read_of_public_files() -> None:
    """Numbers as their papers have them, whatever transformers says."""
    v3, lite = parse_settings(DEEPSEEK_V3)[0], parse_config(DEEPSEEK_V2_LITE)
    assert v3.latent == Latent(rank=512, q_rank=1536, still=128, turned=64, value=128, in_pairs=True)
    assert lite.latent == Latent(rank=512, q_rank=0, still=128, turned=64, value=128, in_pairs=True)
    assert v3.experts is not None
    assert lite.experts is not None
    assert (v3.experts.count, v3.experts.groups, v3.experts.best_groups, v3.experts.normed) == (256, 8, 4, True)
    assert (lite.experts.count, lite.experts.groups, lite.experts.scale, lite.experts.biased) == (64, 1, 1.0, False)
    assert v3.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert v3.rope.attention_factor == 1.0
    minicpm = parse_config(MINICPM3)
    assert minicpm.latent == Latent(rank=256, q_rank=768, still=64, turned=32, value=64, in_pairs=False)
    assert (minicpm.embedding_multiplier, minicpm.logits_scaling, minicpm.tie_word_embeddings) == (12.0, 10.0, True)
    assert minicpm.residual_multiplier == 1.4 / 62**0.5
    assert v3.resolve_max_model_len(None) == 163840


SILENT = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", {"num_experts_per_tok": 6}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {}),
    "Mistral4ForCausalLM": ("mistral4", {}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {}),
    "YoutuForCausalLM": ("youtu", {}),
    "MiniCPM3ForCausalLM": ("minicpm3", {}),
}


@pytest.mark.parametrize("architecture", SILENT)
def test_silence_means_what_it_means_to_transformers(architecture: str) -> None:
    family, needed = SILENT[architecture]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
    theirs = AutoConfig.for_model(family, **sizes, **needed, num_key_value_heads=4)
    ours = parse_config({"architectures": [architecture], "model_type": family, **sizes, **needed})
    with torch.device("meta"):
        agree(ours, AutoModelForCausalLM.from_config(theirs))
    assert (ours.vocab_size, ours.rms_norm_eps) == (theirs.vocab_size, theirs.rms_norm_eps)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.latent is not None
    pairs = family == "deepseek_v2" or getattr(theirs, "rope_interleave", False)
    assert ours.latent.in_pairs == pairs


def test_what_follows_from_other_fields_is_not_read() -> None:
    wanted = parse_config(MOONLIGHT)
    odd = {"head_dim": 64, "num_key_value_heads": 3, "qk_head_dim": 192, "num_mtp_layers": 0, "mlp_bias": False}
    assert parse_config({**MOONLIGHT, **odd}) == wanted
    halves = parse_config({**MOONLIGHT, "rope_interleave": False})
    assert halves.latent is not None
    assert not halves.latent.in_pairs


def test_other_names_of_families() -> None:
    assert parse_config({**MOONLIGHT, "model_type": "kimi_k2"}) == parse_config(MOONLIGHT)
    assert parse_config({**YOUTU, "model_type": "youtu_llm"}) == parse_config(YOUTU)


def test_nulls_that_are_choices() -> None:
    config = parse_config({**MINICPM3, "scale_depth": None, "dim_model_base": None, "v_head_dim": None})
    assert (config.residual_multiplier, config.logits_scaling) == (1.0, 1.0)
    assert config.latent is not None
    assert config.latent.value == 64
    queries = parse_config({**MINICPM3, "q_lora_rank": None}).latent
    assert queries is not None
    assert queries.q_rank == 0


def test_layers_with_experts_are_counted_or_listed() -> None:
    listed = {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45}
    silent = {name: value for name, value in GLM_FLASH.items() if name != "first_k_dense_replace"}
    for fields, first in (({}, 1), (listed, 2), ({"first_k_dense_replace": 4}, 4)):
        experts = parse_config({**silent, **fields}).experts
        assert experts is not None
        assert experts.layers == set(range(first, 47))
    assert parse_config({**GLM_FLASH, "mlp_layer_types": ["dense"] * 47, "first_k_dense_replace": 47}).experts is None


@pytest.mark.parametrize("value", ["attention_bias", "mlp_bias"])
@pytest.mark.parametrize("name", PUBLIC)
def test_refuses_biases(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{value} is True, which would change the result"):
        parse_settings({**PUBLIC[name], value: True})


GROUPS = {**MOONLIGHT, "n_group": 8, "topk_group": 2}


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (YOUTU, {"model_type": "youtu_vl"}, "model_type is 'youtu_vl'; YoutuForCausalLM wants 'youtu'"),
        (MOONLIGHT, {"model_type": "kimi_k3"}, "model_type is 'kimi_k3'; DeepseekV3ForCausalLM wants 'deepseek_v3'"),
        (DEEPSEEK_V2, {"model_type": "kimi_k2"}, "model_type is 'kimi_k2'; DeepseekV2ForCausalLM wants 'deepseek_v2'"),
        (MOONLIGHT, {"model_type": ["kimi_k2"]}, "model_type is \\['kimi_k2'\\]"),
        (MOONLIGHT, {"kv_lora_rank": 0}, "kv_lora_rank is 0; want a positive whole number"),
        (MOONLIGHT, {"kv_lora_rank": 2**21}, "latent's rank is 2097152"),
        (MOONLIGHT, {"q_lora_rank": 0}, "q_lora_rank is 0; want a positive whole number"),
        (MOONLIGHT, {"qk_nope_head_dim": "128"}, "qk_nope_head_dim is '128'"),
        (MOONLIGHT, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; want an even number"),
        (MOONLIGHT, {"v_head_dim": None}, "v_head_dim is None; want a positive whole number"),
        (MOONLIGHT, {"rope_interleave": None}, "rope_interleave is None; want true or false"),
        (MOONLIGHT, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1.0"),
        (MOONLIGHT, {"layer_types": ["sliding_attention"] * 27}, "layer_types is .*; supported for deepseek_v3"),
        (MOONLIGHT, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (MOONLIGHT, {"scoring_func": "softmax"}, "scoring_func is 'softmax', which would change the result"),
        (MOONLIGHT, {"topk_method": "greedy"}, "topk_method is 'greedy', which would change the result"),
        (MOONLIGHT, {"moe_layer_freq": 2}, "moe_layer_freq is 2, which would change the result"),
        (MOONLIGHT, {"norm_topk_prob": None}, "norm_topk_prob is None; want true or false"),
        (MOONLIGHT, {"n_shared_experts": 0}, "n_shared_experts is 0; want a positive whole number"),
        (MOONLIGHT, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; want a whole number"),
        (MOONLIGHT, {"n_group": None}, "n_group is None; want a positive whole number"),
        (MOONLIGHT, {"topk_group": 2}, "topk_group is 2; want no more than n_group \\(1\\)"),
        (GROUPS, {"n_group": 7}, "n_group is 7; want a divisor of the number of experts \\(64\\)"),
        (GROUPS, {"topk_group": 9}, "topk_group is 9; want no more than n_group \\(8\\)"),
        (GROUPS, {"topk_group": 0}, "topk_group is 0; want a positive whole number"),
        (GROUPS, {"n_group": 64, "topk_group": 6}, "n_group is 64; want 32 at most"),
        (GROUPS, {"num_experts_per_tok": 17}, "num_experts_per_tok is 17; want no more than 2 groups of 8 have"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob is True, which would change the result"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (DEEPSEEK_V2, {"num_experts_per_tok": None}, "num_experts_per_tok is None; want a positive whole number"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"] * 46}, "mlp_layer_types is .*; want dense or sparse for each layer"),
        (GLM_FLASH, {"mlp_layer_types": ["odd"] * 47}, "mlp_layer_types is .*; want dense or sparse for each layer"),
        (GLM_FLASH, {"mlp_layer_types": ["sparse"] * 47}, "and first_k_dense_replace is 1; want them to agree"),
        (MINICPM3, {"scale_emb": 0}, "scale_emb is 0; want a number over 0"),
        (MINICPM3, {"scale_depth": "x"}, "scale_depth is 'x'; want a number over 0"),
        (MINICPM3, {"dim_model_base": 0}, "dim_model_base is 0; want a positive whole number"),
        (MINICPM3, {"num_attention_heads": 48}, "hidden_size is 2560; want a multiple of num_attention_heads"),
        (MINICPM3, {"qk_rope_head_dim": 64}, "short_factor has 16 numbers; want 32"),
        (MINICPM3, {"embedding_multiplier": 2.0}, "embedding_multiplier is 2.0, which would change the result"),
    ],
)
def test_refuses_by_name(config: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**config, **fields})


def test_fields_of_other_families_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSeek V2 turns neighbours together, MiniCPM3 never does: neither asks."""
    with caplog.at_level(logging.WARNING):
        parse_config({**DEEPSEEK_V2, "rope_interleave": False})
        parse_config({**MINICPM3, "rope_interleave": True, "sliding_window": 64})
    assert [message.rsplit(": ", 1)[1] for message in caplog.messages] == [
        "rope_interleave",
        "rope_interleave, sliding_window",
    ]


def test_ranks_share_heads_and_each_has_all_latents() -> None:
    config = parse_config(GLM_FLASH)
    for size in (1, 2, 4):
        config.check_tensor_parallel(size)
        assert config.heads.of_rank(size) == 1
        assert config.cache_shapes(3, 64, size) == [(1, 3, 1, 64, 576)] * 47
        assert config.kv_bytes_per_page(64, torch.bfloat16, size) == 47 * 64 * 576 * 2
    with pytest.raises(ValueError, match=r"--tensor-parallel-size is 8; want a divisor of num_attention_heads \(20\)"):
        config.check_tensor_parallel(8)
