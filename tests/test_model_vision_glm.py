"""What config.json says of the vision encoder of GLM-4.1V and its kin, what transformers assumes, what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4vConfig, Glm4vMoeConfig, Glm46VConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from hub_glm import GLM_4_1V, GLM_4_5V
from tercet.model.vision_config import VisionConfig, axes
from tercet.model.vision_reader import read_vision_config
from test_model_vision_config import read

_KINDS = {"glm4v": Glm4vConfig, "glm46v": Glm46VConfig, "glm4v_moe": Glm4vMoeConfig}


@pytest.mark.parametrize("kind", _KINDS)
def test_where_it_is_silent(kind: str, tmp_path: Path) -> None:
    theirs, ours = _KINDS[kind]().vision_config, read(tmp_path, kind)
    assert (ours.hidden_size, ours.out_size) == (theirs.hidden_size, theirs.out_hidden_size)
    assert (ours.inner_size, ours.out_inner_size) == (theirs.out_hidden_size, theirs.intermediate_size)
    assert (ours.num_layers, ours.num_heads) == (theirs.depth, theirs.num_heads)
    assert (ours.patch, ours.merge, ours.frames) == (
        theirs.patch_size,
        theirs.spatial_merge_size,
        theirs.temporal_patch_size,
    )
    assert (ours.positions * ours.patch, ours.cubic) == (theirs.image_size, True)
    assert (ours.eps, ours.theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert (ours.qkv_bias, ours.activation) == (theirs.attention_bias, theirs.hidden_act)
    assert (ours.sections, ours.interleaved) == ((8, 12, 12), False)
    wanted = Glm4vImageProcessorPil.image_mean, Glm4vImageProcessorPil.image_std
    assert (list(ours.mean), list(ours.deviation)) == wanted


@pytest.mark.parametrize("raw", [GLM_4_1V, GLM_4_5V])
def test_public_files(raw: dict[str, Any], tmp_path: Path) -> None:
    config = read_vision_config(tmp_path, raw)
    assert isinstance(config, VisionConfig)
    assert (config.head_dim, config.side, config.out_size, config.positions) == (128, 28, 4096, 24)
    assert config.sections is not None
    assert axes(config.sections, config.interleaved, 32) == [0] * 8 + [1] * 12 + [2] * 12


@pytest.mark.parametrize(
    ("vision", "whole", "message"),
    [
        ({"hidden_act": "gelu"}, {}, "vision_config.hidden_act is 'gelu'"),
        ({"in_channels": 1}, {}, "vision_config.in_channels is 1"),
        ({"num_attention_heads": 12}, {}, "num_attention_heads is 12, which would change the result; supported: none"),
        ({"patch_size": [14, 16]}, {}, "patch_size is [14, 16]; want a positive whole number"),
        ({"num_heads": 7}, {}, "7 heads of 1536 numbers together"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, "supported: of rope_type 'axial'"),
        ({}, {"text_config": {"hidden_size": 5120}}, "out_hidden_size is 4096; want the language model's hidden_size"),
        ({}, {"text_config": {"rope_scaling": {"mrope_section": [8, 24]}}}, "mrope_section is [8, 24]"),
        (
            {},
            {"text_config": {"rope_scaling": {"mrope_section": [8, 12, 12], "mrope_interleaved": True}}},
            "mrope_interleaved is True, which would change the result",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals(tmp_path: Path, vision: dict[str, Any], whole: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, "glm4v", vision, **whole)


def test_a_processor_that_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"temporal_patch_size": 1}')
    with pytest.raises(ValueError, match="temporal_patch_size is 1; want 2, as config"):
        read(tmp_path, "glm4v")
