"""What config.json says of Gemma 4's vision tower, what transformers assumes of it, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4Config, Gemma4VisionConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from gemma4_fields import EYES, PROCESSOR, whole
from tercet.model.vision_reader import read_vision_config
from test_model_vision_config import read


def test_where_it_is_silent(tmp_path: Path) -> None:
    theirs, ours = Gemma4VisionConfig(), read(tmp_path, "gemma4", {"model_type": "gemma4_vision"})
    assert (ours.hidden_size, ours.inner_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (ours.num_layers, ours.num_heads, ours.head_dim) == (
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.head_dim,
    )
    assert (ours.patch, ours.merge) == (theirs.patch_size, theirs.pooling_kernel_size)
    assert (ours.axis_positions, ours.theta) == (theirs.position_embedding_size, theirs.default_theta)
    assert (ours.eps, ours.standardized) == (theirs.rms_norm_eps, theirs.standardize)
    assert ours.out_size == Gemma4Config().text_config.hidden_size
    assert (ours.most_tokens, ours.at_once) == (Gemma4ImageProcessorPil.max_soft_tokens, 0)
    assert (ours.mean, ours.deviation) == ((0.5,) * 3, (0.5,) * 3)


def test_public_files(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps(PROCESSOR))
    for name in ("31B", "26B-A4B"):
        raw = whole(name)
        config = read_vision_config(tmp_path, raw)
        assert config is not None
        assert (config.head_dim, config.side, config.out_size) == (72, 48, raw["text_config"]["hidden_size"])
        assert (config.standardized, config.at_once, config.in_windows) == (True, 280, True)
    assert read_vision_config(tmp_path, whole("26B-A4B", use_bidirectional_attention=None)).at_once == 0  # type: ignore[union-attr]


def test_small_ones(tmp_path: Path) -> None:
    """Their images are read as words are."""
    config = read_vision_config(tmp_path, whole("E2B"))
    assert config is not None
    assert (config.head_dim, config.out_size, config.at_once) == (64, 1536, 0)
    assert (config.clipped, config.standardized) == (True, False)


def test_models_without_a_tower(tmp_path: Path) -> None:
    """Then the language model is served alone."""
    assert read_vision_config(tmp_path, whole("31B") | {"vision_config": None}) is None


def test_pixels_that_are_normed_first(tmp_path: Path) -> None:
    settings = {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 1, 2.0]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    config = read(tmp_path, "gemma4", EYES)
    assert config.mean == pytest.approx((0.35, 0.7, 1.3))
    assert config.deviation == (0.25, 0.5, 1.0)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"model_type": "siglip_vision_model"}, "vision_config.model_type is 'siglip_vision_model'"),
        ({"hidden_activation": "silu"}, "vision_config.hidden_activation is 'silu'"),
        ({"attention_bias": True}, "vision_config.attention_bias is True"),
        ({"num_key_value_heads": 4}, "vision_config.num_key_value_heads is 4; supported: 16"),
        ({"head_dim": 64}, "vision_config.head_dim is 64; supported: 72"),
        ({"position_embedding_size": 800}, "position_embedding_size is 800; want 840 or more for images of 280 tokens"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "supported: of rope_type 'axial'"),
        ({"patch_size": 0}, "patch_size is 0; want a positive whole number"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals(tmp_path: Path, vision: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, "gemma4", {**EYES, **vision})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling_kernel_size": 2}, "pooling_kernel_size is 2; want 3, as config"),
        ({"do_rescale": False}, "do_rescale is False; supported: True"),
        ({"max_soft_tokens": 0}, "max_soft_tokens is 0; want a positive whole number"),
    ],
)
def test_a_processor_that_says_otherwise(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "gemma4", EYES)
