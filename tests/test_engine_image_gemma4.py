"""What Gemma 4's files say of images: sizes to the pixel as transformers has them, words around, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from gemma4_fields import PROCESSOR, whole
from image_processors import as_transformers
from seeing import encoded, picture
from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_marks import Marks
from tercet.engine.image_rules import ImageRules
from tercet.engine.image_sizes import TokenBound
from tercet.engine.images import read_image
from test_engine_image_rules import rules_of

_ADDED = [
    {"id": 255999, "content": "<|image>"},
    {"id": 258880, "content": "<|image|>"},
    {"id": 258882, "content": "<image|>"},
]


def test_public_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": _ADDED}))
    marks = Marks("<|image|>", "<|image><|image|><image|>")
    wanted = ImageRules(258880, 16, 3, TokenBound(280), marks=marks)
    assert rules_of(tmp_path, whole("31B"), PROCESSOR, "processor_config.json") == wanted
    assert wanted.most_seen == 280
    assert rules_of(tmp_path, whole("E2B"), None, "processor_config.json") == wanted
    assert rules_of(tmp_path, whole("31B") | {"vision_config": None}, None) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": _ADDED[:2]}))
    with pytest.raises(UnsupportedModel, match=r"no added token 258882 \(eoi_token_id\); want one; --limit-mm"):
        rules_of(tmp_path, whole("31B"), None)


def test_sizes_as_transformers_has_them() -> None:
    """Of shapes of all kinds, in as many tokens as there may be."""
    random = np.random.default_rng(5)
    sizes = [(1, 1), (1, 5000), (5000, 1), (3, 1000), (1000, 3), (768, 1365), (48, 48), (4000, 6000)]
    sizes += [tuple(sides) for sides in np.exp(random.uniform(0, 9, (400, 2))).astype(int).tolist()]
    for most in (70, 280, 1120):
        for height, width in sizes:
            wanted = get_aspect_ratio_preserving_size(height, width, 16, most * 9, 3)
            assert TokenBound(most).final_size(height, width, 48) == wanted


@pytest.mark.parametrize("size", [(61, 43), (700, 20), (500, 333), (48, 480), (5, 900)])
def test_pixels_as_transformers_makes_them(size: tuple[int, int]) -> None:
    rules = ImageRules(7, 4, 2, TokenBound(70))
    image = picture(*size)
    wanted = as_transformers(image, rules)
    got = read_image(encoded(image), rules)
    assert (got.height, got.width) == wanted.shape[:2]
    assert got.values == wanted.tobytes()
    assert len(rules.tokens(got.height, got.width)) == wanted.size // 3 // 64


@pytest.mark.parametrize(
    ("processor", "settings", "words"),
    [
        ({"patch_size": 14}, {}, "patch_size is 14, and .* 16; want the same"),
        ({"max_soft_tokens": -1}, {}, "max_soft_tokens is -1; want a number of 1 or more"),
        ({"do_resize": False}, {}, "do_resize is False; want True"),
        ({}, {"mm_processor_kwargs": {"max_pixels": 9}}, "max_pixels is 9, and .* a bound of tokens; want no such"),
    ],
)
def test_refusals(tmp_path: Path, processor: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        rules_of(tmp_path, whole("31B"), processor, **settings)
