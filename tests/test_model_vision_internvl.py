"""What config.json says of InternVL's vision encoder, what transformers assumes of it, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import InternVLConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from test_model_vision_config import read


def test_where_internvit_is_silent(tmp_path: Path) -> None:
    theirs, ours = InternVLConfig(), read(tmp_path, "internvl")
    tower = theirs.vision_config
    assert (ours.hidden_size, ours.inner_size, ours.out_size) == (
        tower.hidden_size,
        tower.intermediate_size,
        theirs.text_config.hidden_size,
    )
    assert (ours.num_layers, ours.num_heads) == (tower.num_hidden_layers, tower.num_attention_heads)
    assert ((ours.patch,) * 2, (ours.positions * ours.patch,) * 2) == (tower.patch_size, tower.image_size)
    assert (ours.eps, ours.rms_norms, ours.activation) == (tower.layer_norm_eps, False, "exact")
    assert (ours.qkv_bias, ours.qk_norms, ours.last_norm) == (
        tower.attention_bias,
        tower.use_qk_norm,
        not tower.use_mean_pooling,
    )
    assert (ours.length**2, 1 / ours.merge) == (theirs.image_seq_length, theirs.downsample_ratio)
    wanted = GotOcr2ImageProcessorPil.image_mean, GotOcr2ImageProcessorPil.image_std
    assert (list(ours.mean), list(ours.deviation)) == wanted


def test_what_internvls_files_say(tmp_path: Path) -> None:
    """As those of 38B have it, whose tower is the large one."""
    tower = {
        "architectures": ["InternVisionModel"], "attention_bias": False, "attention_dropout": 0.0, "dropout": 0.0,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 3200, "image_size": [448, 448],
        "intermediate_size": 12800, "layer_norm_eps": 1e-06, "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision", "norm_type": "rms_norm", "num_attention_heads": 25, "num_channels": 3,
        "num_hidden_layers": 45, "patch_size": [14, 14], "use_absolute_position_embeddings": True,
        "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": True,
    }  # fmt: skip
    whole = {"image_seq_length": 256, "projector_hidden_act": "gelu", "vision_feature_layer": -1}
    config = read(tmp_path, "internvl", tower, text_config={"model_type": "qwen2", "hidden_size": 5120}, **whole)
    assert (config.head_dim, config.side, config.merge, config.out_size) == (128, 28, 2, 5120)
    assert (config.length, config.at_once, config.positions, config.theta, config.tiles) == (16, 0, 32, 0, True)
    assert (config.rms_norms, config.qkv_bias, config.qk_norms, config.last_norm) == (True, False, True, False)


@pytest.mark.parametrize(
    ("vision", "whole", "message"),
    [
        ({"model_type": "intern_vit_6b"}, {}, "vision_config.model_type is 'intern_vit_6b'"),
        ({"norm_type": "group_norm"}, {}, "vision_config.norm_type is 'group_norm'"),
        ({"use_absolute_position_embeddings": False}, {}, "use_absolute_position_embeddings is False"),
        ({"use_mask_token": True}, {}, "use_mask_token is True, which would change the result"),
        ({"image_size": [448, 224]}, {}, "image_size is [448, 224]; want a positive whole number"),
        ({"image_size": 450}, {}, "tiles of 450 pixels a side with patches of 14 and a downsample_ratio of 0.5"),
        ({"use_qk_norm": 1}, {}, "use_qk_norm is 1; want true or false"),
        (
            {},
            {"downsample_ratio": 0.3},
            "a downsample_ratio of 0.3 become 256 tokens (image_seq_length); want a square",
        ),
        ({}, {"image_seq_length": 250}, "each of as many whole patches"),
        ({}, {"vision_feature_layer": -2}, "config.json: vision_feature_layer is -2"),
        ({}, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        ({}, {"projector_hidden_act": "relu"}, "config.json: projector_hidden_act is 'relu'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_of_internvits(tmp_path: Path, vision: dict[str, Any], whole: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, "internvl", vision, **whole)
