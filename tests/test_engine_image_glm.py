"""What GLM's files say of images, and what an operator says: read as transformers reads it, or refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from hub_glm import GLM_4_1V, GLM_4_5V, PROCESSOR
from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_rules import ImageRules
from tercet.engine.image_sizes import PixelBounds
from test_engine_image_rules import rules_of, whole


@pytest.mark.parametrize("processor", [PROCESSOR, {}, {"size": {"shortest_edge": 4000, "longest_edge": 90_000}}])
def test_sizes_as_transformers_reads_them(tmp_path: Path, processor: dict[str, Any]) -> None:
    """Old names of bounds, which Qwen's files have, are none of theirs."""
    theirs: Any = Glm4vImageProcessorPil(**processor)
    wanted = PixelBounds(theirs.size["shortest_edge"], theirs.size["longest_edge"], 2, enlarges=True)
    for raw, token in ((GLM_4_1V, 151343), (GLM_4_5V, 151363), (whole("Glm46V"), 151343), (whole("Glm4vMoe"), 151363)):
        rules = rules_of(tmp_path, raw, {**processor, "min_pixels": 3, "max_pixels": 5})
        assert rules == ImageRules(token, theirs.patch_size, theirs.merge_size, wanted)


def test_tokens_of_large_images(tmp_path: Path) -> None:
    """As a hub's files bound them."""
    rules = rules_of(tmp_path, GLM_4_1V, PROCESSOR)
    assert rules is not None
    assert rules.most_seen == 6144
    theirs = Glm4vImageProcessorPil(**PROCESSOR)
    for height, width in ((4000, 6000), (3000, 4000), (3000, 3000), (2200, 1700), (100, 100), (5, 700)):
        patches = theirs.get_number_of_image_patches(height, width)
        assert len(rules.tokens(*rules.final_size(height, width))) == patches // 4


def test_what_an_operator_says_is_of_a_picture(tmp_path: Path) -> None:
    asked = {"mm_processor_kwargs": {"min_pixels": 10_000, "max_pixels": 100_000}}
    rules = rules_of(tmp_path, GLM_4_1V, PROCESSOR, **asked)
    assert rules == ImageRules(151343, 14, 2, PixelBounds(20_000, 200_000, 2, enlarges=True))
    assert rules.most_seen == 100_000 // 28**2


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1, and .* 2; want the same"),
        ({"size": {"height": 9, "width": 9}}, "shortest_edge of size is None"),
        ({"do_resize": False}, "do_resize is False; want True"),
        ({"merge_size": 3}, "merge_size is 3, and .* 2; want the same"),
    ],
)
def test_refusals(tmp_path: Path, processor: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        rules_of(tmp_path, GLM_4_1V, {**PROCESSOR, **processor})
