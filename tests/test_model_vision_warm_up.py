"""Once an eye has been warmed up no image needs a kernel that is not compiled: what launches ask for is written down,
and nothing is compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch

from covering import long
from tercet.model.vision import empty_vision
from tercet.model.vision_reader import read_vision_config
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu

pytestmark = pytest.mark.skipif(INTERPRETED, reason="asks what would be compiled")
META = torch.device("meta")
TOKENS = 3000


_WINDOWS = {"hidden_size": 1280, "depth": 2, "fullatt_block_indexes": [1]}
_TOWER = {"num_hidden_layers": 2, "hidden_act": "silu", "patch_size": 14}
_SIGLIP = {"num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 1152, "intermediate_size": 4304}
_SIGLIP |= {"image_size": 896, "patch_size": 14, "vision_use_head": False}
_INTERNVIT = {"num_hidden_layers": 2, "attention_bias": True}
_LARGE_INTERNVIT = {"num_hidden_layers": 2, "num_attention_heads": 25, "hidden_size": 3200, "intermediate_size": 12800}
_LARGE_INTERNVIT |= {"norm_type": "rms_norm", "use_qk_norm": True}
_GEMMA_4 = {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72}
_GEMMA_4 |= {"hidden_size": 1152, "intermediate_size": 4304, "standardize": True}
_DEEP = {"depth": 2, "deepstack_visual_indexes": [0]}


@pytest.mark.parametrize(
    ("kind", "settings", "deterministic"),
    [
        ("qwen2_5_vl", _WINDOWS, False),
        ("qwen3_vl", _DEEP, True),
        ("mistral3", _TOWER, False),
        ("gemma3", _SIGLIP, False),
        ("gemma4", _GEMMA_4, False),
        ("gemma4", {"model_type": "gemma4_vision", "num_hidden_layers": 2, "use_clipped_linears": True}, False),
        ("internvl", _INTERNVIT, False),
        ("glm4v", {"depth": 2}, False),
        long("glm4v_moe", {"depth": 2, "intermediate_size": 10944}, True),
        long("internvl", _LARGE_INTERNVIT, False),
        long("qwen2_5_vl", _WINDOWS, True),
        long("qwen3_vl", _DEEP, False),
        long("qwen2_vl", {"depth": 2}, False),
        long("mistral3", _TOWER, True),
    ],
)
def test_no_image_needs_another_kernel(
    kind: str, settings: dict[str, Any], deterministic: bool, tmp_path: Path
) -> None:
    config = read_vision_config(tmp_path, {"model_type": kind, "vision_config": settings})
    assert config is not None
    asked: set[str] = set()

    def claim(what: str) -> bool:
        asked.add(what)
        return False

    sizes = [(1, 1), (3, 5), (7, 9), (13, 11), (17, 16), (20, 40), (32, 32), (50, 60)]
    if config.length:
        counts = range(1, TOKENS // config.length**2 + 1) if config.tiles else [1]
        sizes = [(config.length * count, config.length) for count in counts]
    with compiling_for(Gpu("NVIDIA H200", 90, 132), claim):
        vision = empty_vision(config, torch.bfloat16, META, deterministic=deterministic)
        vision.warm_up(TOKENS)
        warm = set(asked)
        for rows, columns in sizes:
            assert rows * columns <= TOKENS
            size = rows * config.side, columns * config.side, 3
            vision.encode(torch.empty(size, dtype=torch.uint8, device=META))
    assert len(warm) > (10 if config.length else 50)
    assert asked == warm
