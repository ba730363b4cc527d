"""What a config.json says of experts: read as transformers reads it, refused where it would change the result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import checkpoint, make_checkpoint, reference_model
from llama_fields import LLAMA
from tercet.model.checkpoint import parse_settings
from tercet.model.config_json import parse_config, read_config_json
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group

QWEN: dict[str, Any] = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


def test_experts_are_where_transformers_has_them() -> None:
    theirs = reference_model(checkpoint("qwen3-moe"))
    ours = parse_config(read_config_json(checkpoint("qwen3-moe"))).experts
    sparse = {index for index, layer in enumerate(theirs.model.layers) if hasattr(layer.mlp, "experts")}
    assert ours is not None
    assert (ours.layers, ours.count, ours.each, ours.normed) == (sparse, 6, 3, False)
    more = parse_config({**QWEN, "num_experts": 9, "num_local_experts": 9, "decoder_sparse_step": 2}).experts
    assert more is not None
    assert (more.layers, more.count, more.each) == ({1}, 9, 8)
    assert parse_config({**QWEN, "mlp_only_layers": [0, 1, 2]}).experts is None
    silent = parse_config(QWEN).experts
    assert silent is not None
    assert (silent.layers, silent.count, silent.each, silent.intermediate_size) == ({0, 1, 2}, 128, 8, 768)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 4}, "num_experts_per_tok is 8; want no more than there are experts \\(4\\)"),
        ({"num_experts": 0}, "num_experts is 0; want a positive whole number"),
        ({"num_experts": 16, "num_local_experts": 8}, "num_experts is 16 and num_local_experts is 8; want one number"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; want a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; want true or false"),
        ({"moe_intermediate_size": 7.5}, "moe_intermediate_size is 7.5"),
    ],
)
def test_refuses_of_experts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**QWEN, **fields})


def of_family(architecture: str, family: str, **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], "model_type": family, **fields}


GLM = of_family("Glm4MoeForCausalLM", "glm4_moe")
MINIMAX = of_family("MiniMaxM2ForCausalLM", "minimax_m2", head_dim=128)
DOTS = of_family("Dots1ForCausalLM", "dots1", num_experts_per_tok=6, n_shared_experts=1)
QWEN2 = of_family("Qwen2MoeForCausalLM", "qwen2_moe", num_key_value_heads=4)


def test_experts_that_all_share() -> None:
    glm = parse_config({**GLM, "first_k_dense_replace": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5})
    assert glm.experts is not None
    assert (glm.experts.layers, glm.experts.shared, glm.experts.shared_gated) == ({2}, 2, False)
    assert (glm.experts.scale, glm.experts.normed, glm.experts.biased, glm.experts.all) == (2.5, True, True, 130)
    assert (glm.rope.rotary_dim(16), glm.qk_norm, glm.guessing_layers) == (8, False, 0)
    assert parse_config({**GLM, "use_qk_norm": True, "num_nextn_predict_layers": 1}).qk_norm
    qwen = parse_config(QWEN2).experts
    assert qwen is not None
    assert (qwen.count, qwen.each, qwen.shared, qwen.shared_gated, qwen.normed) == (60, 4, 4, True, False)
    minimax = parse_config({**MINIMAX, "rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True})
    assert minimax.rope.rotary_dim(128) == 64
    assert minimax.experts is not None
    assert (minimax.experts.count, minimax.experts.each, minimax.experts.shared) == (256, 8, 0)


def test_what_files_of_minimax_say_is_known(caplog: pytest.LogCaptureFixture) -> None:
    quantized = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic"}
    more = {"weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    said = {
        "attn_type_list": [1] * 3,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "use_mtp": True,
        "qk_norm_type": "per_layer",
        "use_qk_norm": True,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_routing_bias": True,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }
    config, quantization = parse_settings({**MINIMAX, **said, "quantization_config": {**quantized, **more}})
    assert config.guessing_layers == 3
    assert quantization is not None
    assert (quantization.is_fp8, quantization.block) == (True, (128, 128))
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (GLM, {"n_group": 8}, "n_group is 8, which would change the result"),
        (GLM, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (GLM, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; want a whole number"),
        (GLM, {"n_shared_experts": 0}, "n_shared_experts is 0"),
        (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        (QWEN2, {"shared_expert_intermediate_size": 2000}, "shared_expert_intermediate_size is 2000; want a multiple"),
        (MINIMAX, {"use_routing_bias": False}, "use_routing_bias is False"),
        (MINIMAX, {"rotary_dim": 0}, "rotary_dim is 0"),
        (MINIMAX, {"attn_type_list": [1, 0, 1]}, "attn_type_list is .*; supported: 1 for each layer"),
        (DOTS, {}, "n_routed_experts is missing"),
    ],
)
def test_refuses_of_shared_experts(config: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**config, **fields})


def test_ranks_must_divide_an_expert() -> None:
    config = parse_config({**QWEN, "moe_intermediate_size": 45, "intermediate_size": 97})
    with pytest.raises(ValueError, match="is 2; want a divisor of the experts' intermediate size \\(45\\)"):
        config.check_tensor_parallel(2)
    parse_config({**QWEN, "moe_intermediate_size": 46, "intermediate_size": 97}).check_tensor_parallel(2)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As GLM's files have one behind the last; others are not part of the model."""
    folder = make_checkpoint("glm4-moe", tmp_path / "model", num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.ones(64, 128)}, file)
    opened = open_for(folder, torch.device("cpu"))
    load_decoder(opened, Group.single(torch.device("cpu")))
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.ones(64, 128)}, file)
    with pytest.raises(ValueError, match=r"not part of this model: model\.layers\.4\.eh_proj"):
        load_decoder(open_for(folder, torch.device("cpu")), Group.single(torch.device("cpu")))
