"""What a checkpoint's files say of images that are cut into tiles, and what an operator says."""

from pathlib import Path

import pytest

from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_marks import Marks
from tercet.engine.image_rules import ImageRules
from tercet.engine.image_sizes import Tiles
from test_engine_image_rules import INTERNVL, rules_of, write

INTERNVLS_ADDED = [
    {"id": 151665, "content": "<img>"},
    {"id": 151666, "content": "</img>"},
    {"id": 151667, "content": "<IMG_CONTEXT>"},
]
TILE = {"size": {"height": 448, "width": 448}}


def test_internvls_images_are_tiles(tmp_path: Path) -> None:
    """Also where a file says none: as in transformers, where that is the processor's matter."""
    write(tmp_path, tokenizer={"added_tokens": INTERNVLS_ADDED}, processor_config={"image_seq_length": 256})
    marks = Marks("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>")
    for processor in (
        {},
        {**TILE, "crop_to_patches": False, "min_patches": 1, "max_patches": 12, "do_center_crop": True},
    ):
        rules = rules_of(tmp_path, INTERNVL, processor)
        assert rules == ImageRules(151667, 14, 2, Tiles(448, 1, 12), marks=marks)
        assert (rules.most_seen, rules.final_size(100, 100), rules.final_size(31, 5000)) == (
            13 * 256,
            (448, 448),
            (13 * 448, 448),
        )
    rules = rules_of(tmp_path, INTERNVL, {**TILE, "min_patches": 2, "max_patches": 6})
    assert rules is not None
    assert (rules.sizes, rules.written("a <IMG_CONTEXT>b")) == (Tiles(448, 2, 6), "a <img><IMG_CONTEXT></img>b")
    rules = rules_of(tmp_path, INTERNVL, TILE, mm_processor_kwargs={"max_patches": 1})
    assert rules is not None
    assert (rules.sizes, rules.most_seen) == (Tiles(448, 1, 1), 256)


def test_marks_of_internvls_tokenizers(tmp_path: Path) -> None:
    """What stands around an image has the names that a tokenizer's settings give it."""
    rules = rules_of(tmp_path, INTERNVL, TILE)
    assert rules is not None
    assert rules.marks is None
    write(tmp_path, tokenizer={"added_tokens": [*INTERNVLS_ADDED, {"id": 7, "content": "<begin>"}]})
    for settings in ({"start_image_token": "<begin>"}, {"extra_special_tokens": {"start_image_token": "<begin>"}}):
        write(tmp_path, tokenizer_config=settings)
        rules = rules_of(tmp_path, INTERNVL, TILE)
        assert rules is not None
        assert rules.marks == Marks("<IMG_CONTEXT>", "<begin><IMG_CONTEXT></img>")
    for wrong, words in (
        ({"end_image_token": "<end>"}, "no added token '<end>' .end_image_token.; want one"),
        (
            {"context_image_token": "<img>"},
            "context_image_token .* is '<img>', and image_token_id names '<IMG_CONTEXT>'",
        ),
    ):
        write(tmp_path, tokenizer_config=wrong)
        with pytest.raises(UnsupportedModel, match=words):
            rules_of(tmp_path, INTERNVL, TILE)
