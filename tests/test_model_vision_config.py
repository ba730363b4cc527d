"""What config.json says of a vision encoder, what transformers assumes where it is silent, and what is refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Mistral3Config, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3_5Config, Qwen3VLConfig
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tercet.model.vision_config import VisionConfig, axes
from tercet.model.vision_reader import read_vision_config

KINDS = {
    "qwen2_vl": Qwen2VLConfig,
    "qwen2_5_vl": Qwen2_5_VLConfig,
    "qwen3_vl": Qwen3VLConfig,
    "qwen3_5": Qwen3_5Config,
}
MISTRAL = {"model_type": "mistral"}


def read(folder: Path, kind: str, vision: object = None, **more: Any) -> VisionConfig:
    config = read_vision_config(folder, {"model_type": kind, "vision_config": vision, **more})
    assert config is not None
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_silent_is_as_in_transformers(kind: str, tmp_path: Path) -> None:
    given = {"num_heads": 32} if kind == "qwen2_5_vl" else {}  # theirs are too wide
    theirs = KINDS[kind](vision_config=dict(given)).vision_config
    ours = read(tmp_path, kind, given)
    hidden = theirs.embed_dim if kind == "qwen2_vl" else theirs.hidden_size
    out = theirs.hidden_size if kind == "qwen2_vl" else theirs.out_hidden_size
    inner = hidden * theirs.mlp_ratio if kind == "qwen2_vl" else theirs.intermediate_size
    assert (ours.hidden_size, ours.out_size, ours.inner_size) == (hidden, out, inner)
    assert (ours.num_layers, ours.num_heads) == (theirs.depth, theirs.num_heads)
    assert (ours.patch, ours.merge, ours.frames) == (
        theirs.patch_size,
        theirs.spatial_merge_size,
        theirs.temporal_patch_size,
    )
    assert ours.theta == theirs.rope_parameters["rope_theta"]
    assert ours.positions**2 == getattr(theirs, "num_position_embeddings", 0)
    assert list(ours.deep_layers) == list(getattr(theirs, "deepstack_visual_indexes", []))
    assert sorted(ours.whole_layers) == list(getattr(theirs, "fullatt_block_indexes", []))
    assert ours.window == (4 if kind == "qwen2_5_vl" else 0)


def test_where_pixtral_is_silent(tmp_path: Path) -> None:
    theirs = Mistral3Config(vision_config={"model_type": "pixtral", "hidden_act": "silu"}, text_config=MISTRAL)
    ours = read(tmp_path, "mistral3", {"hidden_act": "silu"}, text_config=MISTRAL)
    tower, text = theirs.vision_config, theirs.text_config
    assert (ours.hidden_size, ours.inner_size, ours.out_size) == (
        tower.hidden_size,
        tower.intermediate_size,
        text.hidden_size,
    )
    assert (ours.num_layers, ours.num_heads) == (tower.num_hidden_layers, tower.num_attention_heads)
    assert (ours.patch, ours.merge) == (tower.patch_size, theirs.spatial_merge_size)
    assert (ours.theta, ours.out_eps) == (tower.rope_parameters["rope_theta"], text.rms_norm_eps)
    assert ours.out_bias == theirs.multimodal_projector_bias
    assert (ours.mean, ours.deviation) == tuple(
        tuple(values) for values in (PixtralImageProcessorPil.image_mean, PixtralImageProcessorPil.image_std)
    )


def test_what_mistrals_files_say(tmp_path: Path) -> None:
    """As those of Mistral Small 3.2 have it."""
    tower = {
        "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
        "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
        "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
    }  # fmt: skip
    text = {**MISTRAL, "hidden_size": 5120, "rms_norm_eps": 1e-05}
    whole = {"multimodal_projector_bias": False, "projector_hidden_act": "gelu", "vision_feature_layer": -1}
    config = read(tmp_path, "mistral3", tower, text_config=text, spatial_merge_size=2, **whole)
    assert (config.head_dim, config.side, config.out_size, config.sections) == (64, 28, 5120, None)


def test_where_siglip_is_silent(tmp_path: Path) -> None:
    theirs = Gemma3Config(vision_config={"image_size": 256})
    ours = read(tmp_path, "gemma3", {"image_size": 256})
    tower, text = theirs.vision_config, theirs.text_config
    assert (ours.hidden_size, ours.inner_size, ours.out_size) == (
        tower.hidden_size,
        tower.intermediate_size,
        text.hidden_size,
    )
    assert (ours.num_layers, ours.num_heads) == (tower.num_hidden_layers, tower.num_attention_heads)
    assert (ours.patch, ours.eps) == (tower.patch_size, tower.layer_norm_eps)
    assert (ours.length**2, ours.merge, ours.positions) == (theirs.mm_tokens_per_image, 1, 16)
    wanted = Gemma3ImageProcessorPil.image_mean, Gemma3ImageProcessorPil.image_std
    assert (list(ours.mean), list(ours.deviation)) == wanted


def test_what_gemmas_files_say(tmp_path: Path) -> None:
    """As those of Gemma 3 4B have it."""
    tower = {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    text = {"model_type": "gemma3_text", "hidden_size": 2560}
    config = read(tmp_path, "gemma3", tower, text_config=text, mm_tokens_per_image=256)
    assert (config.head_dim, config.side, config.merge, config.out_size) == (72, 56, 4, 2560)
    assert (config.length, config.at_once, config.positions, config.theta) == (16, 256, 64, 0)


def test_families_that_cannot_see(tmp_path: Path) -> None:
    assert read_vision_config(tmp_path, {"model_type": "llama"}) is None
    assert read_vision_config(tmp_path, {"model_type": "gemma3_text"}) is None
    assert read_vision_config(tmp_path, {}) is None


def test_the_first_form(tmp_path: Path) -> None:
    """The language model's settings on the same level, and names of sizes that nothing reads."""
    vision = {"depth": 32, "in_chans": 3, "hidden_size": 1536, "spatial_patch_size": 14}
    scaling = {"type": "mrope", "mrope_section": [8, 12, 12]}
    config = read(tmp_path, "qwen2_vl", vision, hidden_size=1536, rope_scaling=scaling)
    assert (config.out_size, config.sections, config.interleaved) == (1536, (8, 12, 12), False)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("preprocessor_config.json", {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}),
        ("processor_config.json", {"image_processor": {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}}),
    ],
)
def test_how_pixels_are_prepared(tmp_path: Path, file: str, settings: dict[str, Any]) -> None:
    assert read(tmp_path, "qwen2_vl").mean[0] == 0.48145466
    assert read(tmp_path, "qwen3_vl").mean == read(tmp_path, "qwen3_5_moe").deviation == (0.5, 0.5, 0.5)
    (tmp_path / file).write_text(json.dumps(settings))
    config = read(tmp_path, "qwen3_5")
    assert (config.mean, config.deviation) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("kind", "vision", "message"),
    [
        ("qwen3_vl", [1], "vision_config is [1]; want an object"),
        ("qwen3_vl", {"depth": 0}, "depth is 0; want a positive whole number"),
        ("qwen3_vl", {"patch_size": [16, 16]}, "patch_size is [16, 16]"),
        ("qwen3_vl", {"in_channels": 4}, "vision_config.in_channels is 4, which would change the result; supported: 3"),
        ("qwen3_vl", {"hidden_act": "silu"}, "vision_config.hidden_act is 'silu'"),
        ("qwen2_5_vl", {"hidden_act": "gelu"}, "supported: 'silu', 'swish'"),
        ("qwen3_vl", {"num_attention_heads": 8}, "vision_config.num_attention_heads is 8"),
        ("qwen3_5", {"deepstack_visual_indexes": [1]}, "vision_config.deepstack_visual_indexes is [1]"),
        ("qwen3_vl", {"deepstack_visual_indexes": [3, 2]}, "want numbers of its 27 layers, each once and in order"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [32]}, "want numbers of its 32 layers"),
        ("qwen2_5_vl", {"window_size": 20}, "window_size is 20; want 28 or more"),
        ("qwen3_vl", {"num_position_embeddings": 50}, "num_position_embeddings is 50; want a square"),
        ("qwen3_vl", {"num_heads": 5}, "has 5 heads of 1152 numbers together; want of each a multiple of 4"),
        ("qwen3_vl", {"rope_parameters": {"rope_type": "yarn"}}, "supported: of rope_type 'axial'"),
        ("qwen3_vl", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'; want a number over 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals(tmp_path: Path, kind: str, vision: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, kind, {"num_heads": 32, **vision} if isinstance(vision, dict) else vision)


@pytest.mark.parametrize(
    ("vision", "whole", "message"),
    [
        (
            {"hidden_act": None},
            {},
            "vision_config.hidden_act is 'gelu', which would change the result; supported: 'silu'",
        ),
        ({"model_type": "siglip_vision_model"}, {}, "vision_config.model_type is 'siglip_vision_model'"),
        ({"head_dim": 104}, {}, "vision_config.head_dim is 104, which would change the result; supported: 64"),
        ({}, {"vision_feature_layer": -2}, "config.json: vision_feature_layer is -2"),
        ({}, {"projector_hidden_act": "relu"}, "config.json: projector_hidden_act is 'relu'"),
        ({}, {"multimodal_projector_bias": 1}, "multimodal_projector_bias is 1; want true or false"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers is 0; want a positive whole number"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_of_pixtrals(tmp_path: Path, vision: dict[str, Any], whole: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, "mistral3", {"hidden_act": "silu", **vision}, text_config=MISTRAL, **whole)


@pytest.mark.parametrize(
    ("vision", "whole", "message"),
    [
        ({"model_type": "pixtral"}, {}, "vision_config.model_type is 'pixtral'"),
        ({"hidden_act": "relu"}, {}, "vision_config.hidden_act is 'relu'"),
        ({"image_size": 250}, {}, "images of 250 pixels a side with patches of 16 become 256 tokens"),
        ({"image_size": 256}, {"mm_tokens_per_image": 200}, "become 200 tokens (mm_tokens_per_image); want a square"),
        ({"image_size": 320}, {}, "each of as many whole patches"),
        ({"num_attention_heads": 7}, {}, "has 7 heads of 768 numbers together"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_of_siglips(tmp_path: Path, vision: dict[str, Any], whole: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, "gemma3", {"image_size": 256, **vision}, **whole)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("qwen3_vl", {"hidden_size": 64}, "vision_config.out_hidden_size is 3584; want the language model's"),
        ("qwen3_vl", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section is [1, 2]; want three numbers"),
        ("qwen3_vl", {"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved is False"),
        ("qwen2_vl", {"rope_scaling": {"mrope_interleaved": True}}, "mrope_interleaved is True"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_of_the_language_models(tmp_path: Path, kind: str, text: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, kind, {}, text_config=text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_normalize": False}, "do_normalize is False; supported: True"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1.0"),
        ({"patch_size": 14}, "patch_size is 14; want 16, as config.json's vision_config has it"),
        ({"image_std": [0.5, 0.5]}, "image_std is [0.5, 0.5]; want three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std is [0.5, 0, 0.5]; want three numbers over 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_of_how_pixels_are_prepared(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, "qwen3_vl")


@pytest.mark.parametrize(
    ("sections", "interleaved", "count"),
    [((2, 3, 3), False, 8), ((3, 3, 2), True, 8), ((11, 11, 10), True, 32), ((24, 20, 20), True, 9)],
)
def test_axes(sections: tuple[int, int, int], interleaved: bool, count: int) -> None:
    """As transformers recomposes frequencies of three axes."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    theirs: Any = Qwen3VLTextRotaryEmbedding if interleaved else Qwen2VLRotaryEmbedding
    each = torch.arange(3)[:, None, None, None].repeat(1, 1, 1, count)
    wanted = theirs.recomposition_frequencies(SimpleNamespace(mrope_section=list(sections)), each)
    assert axes(sections, interleaved, count) == wanted.flatten().tolist()[:count]


def test_sections_that_do_not_fill_a_head() -> None:
    with pytest.raises(ValueError, match=r"mrope_section is \[2, 3, 3\]; want a sum of 9"):
        axes((2, 3, 3), False, 9)
