"""GGUF files of every architecture against transformers on the checkpoint that they were made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from checkpoints import make_checkpoint, random_prompts, reference_greedy, reference_model
from converted import convert, rounded
from loaded_weights import load, weight_list
from paged_sequences import Sequences, make_decoder
from tercet.model.checkpoint import read_config
from tercet.model.rope import Rope

F16, Q8_0 = GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0
# With sizes that blocks of quantized numbers divide; and where files have no word for something, as llama.cpp takes it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24, "num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "phi3": ("phi3", {"hidden_size": 96}),
    "phi3-short": ("phi3-long", {"original_max_position_embeddings": 512}),
    "phi3-long": ("phi3-long", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5, "use_sliding_window": False}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen3-moe": ("qwen3-moe", {"mlp_only_layers": [], "norm_topk_prob": True, "moe_intermediate_size": 64}),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    return {}


@pytest.fixture
def folder(request: pytest.FixtureRequest, made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one of FAMILIES, made once."""
    if request.param not in made:
        family, overrides = FAMILIES[request.param]
        made[request.param] = make_checkpoint(family, tmp_path_factory.mktemp("made") / "checkpoint", **overrides)
    return made[request.param]


def in_float32(value: Any) -> Any:
    """Numbers as these files store them, of a Rope, too."""
    match value:
        case float():
            return float(np.float32(value))
        case Rope():
            return in_float32(tuple(vars(value).values()))
        case tuple():
            return tuple(in_float32(one) for one in value)
    return value


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_same_logits_and_tokens_as_transformers(folder: Path, tmp_path: Path) -> None:
    file = convert(folder, tmp_path / "model.gguf", Q8_0)
    theirs = rounded(folder, Q8_0, tmp_path / "rounded")
    (prompt,) = random_prompts(1, 50, 50, seed=3)
    (answer,) = reference_greedy(theirs, [prompt], 20)
    with torch.inference_mode():
        wanted = reference_model(theirs)(torch.tensor([prompt + answer])).logits[0, 49:-1]
    run = Sequences(make_decoder(file), 1)
    got = torch.cat([run.step({}, {0: prompt}), *(run.step({0: token}, {}) for token in answer[:-1])])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert got.argmax(1).tolist() == answer
    assert len(set(answer)) > 5


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_same_configuration_and_weights_as_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    file = convert(folder, tmp_path / "model.gguf", F16)
    ours, theirs = read_config(file), read_config(rounded(folder, F16, tmp_path / "rounded"))
    for name in vars(theirs).keys() - {"dtype", "norm_shift"}:
        assert in_float32(getattr(ours, name)) == in_float32(getattr(theirs, name)), name
    assert ours.dtype == torch.float16
    for rank in range(2):
        pairs = zip(weight_list(load(file, rank, 2)), weight_list(load(tmp_path / "rounded", rank, 2)), strict=True)
        # Where one is added to weights of norms, here and there, their last bit may differ.
        assert all(torch.equal(a, b) if a.ndim > 1 else torch.allclose(a, b, rtol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "windows", "local"),
    [
        ({"rope.freq_base_swa": None}, [12, 12, 12, 12, 12, 0, 12], 10_000.0),
        ({"attention.sliding_window_pattern": 3}, [12, 12, 0, 12, 12, 0, 12], 1_000.0),
        ({"attention.sliding_window_pattern": [True, False] * 3 + [False]}, [12, 0, 12, 0, 12, 0, 0], 1_000.0),
        ({"attention.sliding_window": None}, [0] * 7, 1_000.0),
    ],
)
def test_windows_of_gemma(
    folder: Path, settings: dict[str, Any], windows: list[int], local: float, tmp_path: Path
) -> None:
    config = read_config(convert(folder, tmp_path / "model.gguf", settings=settings))
    assert config.layer_windows == tuple(windows)
    assert config.layer_ropes == tuple(Rope(local) if window else config.rope for window in windows)
    assert config.rope == Rope(50_000.0, "linear", 4.0)


@pytest.mark.parametrize(
    ("folder", "num_layers", "scale"),
    [("gemma2", 26, 24), ("gemma2", 46, 16), ("gemma3", 34, 24), ("gemma3", 62, 16)],
    indirect=["folder"],
)
def test_only_the_largest_gemmas_scale_scores_by_hidden_size(
    folder: Path, num_layers: int, scale: int, tmp_path: Path
) -> None:
    config = read_config(convert(folder, tmp_path / "model.gguf", settings={"block_count": num_layers}))
    assert config.attention_scale == scale**-0.5


@pytest.mark.parametrize("folder", ["gemma2"], indirect=True)
def test_what_a_file_of_gemma_2_leaves_out(folder: Path, tmp_path: Path) -> None:
    silent = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"))
    config = read_config(convert(folder, tmp_path / "model.gguf", settings=silent))
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.layer_windows == (4096, 0, 4096)


@pytest.mark.parametrize("folder", ["granite"], indirect=True)
def test_what_a_file_of_granite_leaves_out(folder: Path, tmp_path: Path) -> None:
    silent = dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale"))
    config = read_config(convert(folder, tmp_path / "model.gguf", settings=silent))
    assert (config.attention_scale, config.embedding_multiplier, config.residual_multiplier) == (0.25, 1.0, 1.0)


@pytest.mark.parametrize("folder", ["qwen3-moe"], indirect=True)
def test_size_of_experts_that_is_left_out(folder: Path, tmp_path: Path) -> None:
    config = read_config(convert(folder, tmp_path / "model.gguf", settings={"expert_feed_forward_length": None}))
    assert config.experts is not None
    assert config.experts.intermediate_size == 96 // 3


@pytest.mark.parametrize(
    ("folder", "settings", "extra", "words"),
    [
        ("qwen3-moe", {"expert_weights_norm": False}, {}, "expert_weights_norm is False; supported: True"),
        ("qwen3-moe", {"expert_weights_scale": 2.5}, {}, "expert_weights_scale is 2.5; supported: 0.0, 1.0"),
        ("qwen3-moe", {"expert_gating_func": 2}, {}, "expert_gating_func is 2; supported: 0, 1"),
        ("qwen3-moe", {"expert_used_count": 7}, {}, r"expert_used_count is 7; want no more than there are experts \(6"),
        ("qwen3-moe", {"expert_shared_count": 1}, {}, "not supported and may change .*: qwen3moe.expert_shared_count"),
        ("qwen3-moe", {"expert_count": 5}, {}, r"not part of this model: model.layers.0.mlp.experts.5.down_proj"),
        ("qwen3-moe", {}, {"blk.0.ffn_up.weight": torch.ones(96, 64)}, "not part of this model: .*0.mlp.up_proj"),
        ("mixtral", {"expert_feed_forward_length": 96}, {}, "not supported .*: llama.expert_feed_forward_length"),
        ("mixtral", {"expert_count": 0}, {}, "not supported .*: llama.expert_used_count"),
        ("mixtral", {}, {"blk.0.ffn_gate.0.weight": torch.ones(96, 64)}, "not part of .*: blk.0.ffn_gate.0.weight"),
        ("granite", {"rope.scaling.finetuned": False}, {}, "rope.scaling.finetuned is False; supported: True"),
        ("granite", {"logit_scale": None}, {}, "granite.logit_scale is None; want a number over 0"),
        ("granite", {"deepstack_mapping": [1]}, {}, "not supported .*: granite.deepstack_mapping"),
        ("olmo2", {"attention.sliding_window": 4096}, {}, "not supported .*: olmo2.attention.sliding_window"),
        ("smollm3", {"attention.scale": 0.5}, {}, "not supported .*: smollm3.attention.scale"),
        ("gemma2", {"attention.scale": 0.5}, {}, "not supported .*: gemma2.attention.scale"),
        ("gemma2", {"attention.sliding_window_pattern": 0}, {}, "_pattern is 0; want a positive whole number, or true"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, {}, r"_pattern is \[True\]; want .* for 7 layers"),
        ("gemma3", {"rope.freq_base_swa": 0.0}, {}, "rope.freq_base_swa is 0.0; want a number over 1"),
        ("gemma3", {"rope.dimension_count": 12}, {}, "rope.dimension_count is 12; supported: 24, the head's size"),
        ("phi3", {"attention.sliding_window": None}, {}, "sliding_window is None; want 0 or a positive whole number"),
        ("phi3", {"rope.dimension_count": 18}, {}, "rope.dimension_count is 18; supported: 16, the head's size"),
        ("phi3", {}, {"rope_factors_long.weight": torch.ones(8)}, "has rope_factors_long.weight; want rope_freqs.w"),
        ("phi3-long", {"rope.dimension_count": 8}, {}, "short_factor has 6 numbers; want 4"),
        ("phi3-long", {"rope.scaling.factor": 4.0}, {}, "rope_factors_short.weight beside .* 'linear'"),
    ],
    indirect=["folder"],
)
def test_refuses_by_name(
    folder: Path, settings: dict[str, Any], extra: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        load(convert(folder, tmp_path / "model.gguf", settings=settings, extra=extra))
