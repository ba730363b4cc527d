"""What a checkpoint's files say of images, and what an operator says: read as transformers reads it, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tercet.engine import image_rules
from tercet.engine.config import EngineConfig
from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_breaks import Breaks
from tercet.engine.image_marks import Marks
from tercet.engine.image_rules import ImageRules, load_image_rules
from tercet.engine.image_sizes import OneSize, PixelBounds, SideBounds
from tercet.model.text_part import WHOLES
from tercet.model.vision_kinds import KINDS
from tercet.model.vision_reader import _READERS

QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
"""As Qwen2-VL's file has them, and Qwen2.5-VL's."""
QWEN3 = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2}


def rules_of(
    folder: Path,
    config: dict[str, Any],
    processor: dict[str, Any] | None,
    name: str = "preprocessor_config.json",
    **settings: Any,
) -> ImageRules | None:
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / name).write_text(json.dumps(processor))
    return load_image_rules(folder, EngineConfig(model="x", **settings))


def whole(name: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [f"{name}ForConditionalGeneration"], **more}


@pytest.mark.parametrize("processor", [QWEN2, QWEN3, {}, {"min_pixels": 100, "size": dict(QWEN3["size"])}])  # type: ignore[call-overload]
def test_sizes_as_transformers_reads_them(tmp_path: Path, processor: dict[str, Any]) -> None:
    ours = rules_of(tmp_path, whole("Qwen2VL", image_token_id=9), processor)
    theirs: Any = Qwen2VLImageProcessorPil(**json.loads(json.dumps(processor)))
    wanted = PixelBounds(theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert ours == ImageRules(9, theirs.patch_size, theirs.merge_size, wanted)


@pytest.mark.parametrize(
    ("config", "token_id", "sides"),
    [
        (whole("Qwen2VL", vision_config={"patch_size": 14, "spatial_merge_size": 2}), 151655, (14, 2)),
        (whole("Qwen2_5_VL"), 151655, (14, 2)),
        (whole("Qwen3VL", vision_config={"patch_size": [16, 16], "spatial_merge_size": 2}), 151655, (16, 2)),
        (whole("Qwen3_5", vision_config={"patch_size": 16}), 248056, (16, 2)),
        (whole("Qwen3_5Moe", image_token_id=77, vision_config={"patch_size": 16}), 77, (16, 2)),
    ],
)
def test_families(tmp_path: Path, config: dict[str, Any], token_id: int, sides: tuple[int, int]) -> None:
    rules = rules_of(tmp_path, config, None)
    assert rules is not None
    assert (rules.token_id, rules.patch_size, rules.merge_size) == (token_id, *sides)


MISTRAL = whole("Mistral3", vision_config={"patch_size": 14}, spatial_merge_size=2)
PROCESSOR = {"patch_size": 14, "spatial_merge_size": 2, "image_break_token": "[IMG_BREAK]"}
ADDED = [{"id": 12, "content": "[IMG_BREAK]"}, {"id": 13, "content": "[IMG_END]"}, {"id": 14, "content": "</row>"}]


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        ({"longest_edge": 1540}, (1540, 1540)),
        ({"height": 300, "width": 700}, (300, 700)),
        (640, (640, 640)),
        (None, (1024, 1024)),
    ],
)
def test_pixtrals_sizes_as_transformers_reads_them(tmp_path: Path, size: Any, bounds: tuple[int, int]) -> None:
    settings: Any = {"patch_size": {"height": 14, "width": 14}} | ({} if size is None else {"size": size})
    theirs = PixtralImageProcessorPil(**settings).size
    assert bounds == ((theirs.longest_edge,) * 2 if theirs.longest_edge else (theirs.height, theirs.width))
    write(tmp_path, processor_config=PROCESSOR, tokenizer={"added_tokens": ADDED})
    rules = rules_of(tmp_path, {**MISTRAL, "image_token_index": 11}, settings)
    assert rules == ImageRules(11, 14, 2, SideBounds(*bounds), breaks=Breaks(12, 13))
    assert rules.most_seen == -(-bounds[0] // 28) * -(-bounds[1] // 28)


def test_words_between_rows(tmp_path: Path) -> None:
    """In the settings of a tokenizer, else in itself; else, where there is none, Mistral's."""
    assert rules_of(tmp_path, MISTRAL, None) == ImageRules(10, 14, 2, SideBounds(1024, 1024), breaks=Breaks(12, 13))
    decoder = {str(one["id"]): {"content": one["content"]} for one in ADDED}
    write(tmp_path, processor_config=PROCESSOR | {"image_end_token": "</row>"})
    for files in ({"tokenizer_config": {"added_tokens_decoder": decoder}}, {"tokenizer": {"added_tokens": ADDED}}):
        write(tmp_path, **files)
        rules = rules_of(tmp_path, MISTRAL, None)
        assert rules is not None
        assert rules.breaks == Breaks(12, 14)
        write(tmp_path, **{name: {} for name in files})
    with pytest.raises(UnsupportedModel, match=r"no added token '\[IMG_BREAK\]' \(image_break_token\); want one"):
        rules_of(tmp_path, MISTRAL, None)


GEMMA = whole("Gemma3", vision_config={"image_size": 896, "patch_size": 14}, mm_tokens_per_image=256)
GEMMAS_ADDED = [
    {"id": 255999, "content": "<start_of_image>"},
    {"id": 256000, "content": "<end_of_image>"},
    {"id": 262144, "content": "<image_soft_token>"},
]
MARKS = Marks("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n")


def test_gemmas_images_have_one_size(tmp_path: Path) -> None:
    """Those of the hub say what is usual of all that they say: of size, of how it is made, and of crops."""
    said = {"size": {"height": 896, "width": 896}, "resample": 2, "do_pan_and_scan": None, "image_seq_length": 256}
    write(tmp_path, tokenizer={"added_tokens": GEMMAS_ADDED})
    wanted = ImageRules(262144, 14, 4, OneSize(896, 896), 2, marks=MARKS)
    for processor in (said, {}, {"size": 896}):
        rules = rules_of(tmp_path, GEMMA, processor)
        assert rules == wanted
        assert (rules.most_seen, len(rules.tokens(896, 896)), rules.final_size(31, 5000)) == (256, 256, (896, 896))
    assert rules.written("a <start_of_image>b") == f"a {MARKS.written}b"
    small = whole(
        "Gemma3", image_token_index=7, vision_config={"image_size": 256}, boi_token_index=8, eoi_token_index=9
    )
    write(tmp_path, tokenizer={"added_tokens": [{"id": number, "content": f"<{number}>"} for number in (7, 8, 9)]})
    assert rules_of(tmp_path, small, {}) == ImageRules(
        7, 16, 1, OneSize(256, 256), 2, marks=Marks("<8>", "\n\n<8><7><9>\n\n")
    )


def test_marks_of_a_tokenizer(tmp_path: Path) -> None:
    """None where there is none: then prompts are ids."""
    rules = rules_of(tmp_path, GEMMA, {})
    assert rules is not None
    assert (rules.marks, rules.written("<start_of_image>")) == (None, "<start_of_image>")
    write(tmp_path, tokenizer={"added_tokens": GEMMAS_ADDED[1:]})
    with pytest.raises(UnsupportedModel, match=r"no added token 255999 \(boi_token_index\); want one; --limit-mm"):
        rules_of(tmp_path, GEMMA, {})


INTERNVL = whole("InternVL", vision_config={"image_size": [448, 448], "patch_size": [14, 14]})


def test_the_newer_file_counts_and_the_operator_most(tmp_path: Path) -> None:
    rules_of(tmp_path, whole("Qwen3VL"), QWEN2)
    asked = {"mm_processor_kwargs": {"max_pixels": 100_000}}
    rules = rules_of(tmp_path, whole("Qwen3VL"), {"image_processor": QWEN3}, "processor_config.json", **asked)
    assert rules == ImageRules(151655, 16, 2, PixelBounds(65536, 100_000))


@pytest.mark.parametrize(
    "config",
    [{}, {"architectures": None}, whole("Llava"), {"architectures": ["Qwen3ForCausalLM"]}, {"architectures": []}],
)
def test_models_that_see_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    assert rules_of(tmp_path, config, QWEN2) is None


def test_files_of_text_and_engines_for_text(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert load_image_rules(tmp_path / "x.gguf", EngineConfig(model="x")) is None
    assert rules_of(tmp_path, whole("Qwen3VL"), {"size": 3}, limit_mm_per_prompt={"image": 0}) is None


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        (whole("Qwen2VL"), {"do_resize": False}, "do_resize is False; want True"),
        (whole("Qwen2VL"), {"size": {"height": 9, "width": 9}}, "shortest_edge of size is None"),
        (whole("Qwen2VL"), {"size": 448}, "size is 448; want shortest_edge"),
        (whole("Qwen2VL"), {"max_pixels": True}, "longest_edge of size is True"),
        (whole("Qwen2VL"), {"max_pixels": 9}, "at least 3136 pixels and at most 9"),
        (whole("Qwen2VL"), {"patch_size": "14"}, "patch_size is '14'"),
        (
            whole("Qwen2VL", vision_config={"patch_size": 16}),
            {"patch_size": 14},
            "patch_size is 14, and .* 16; want the same",
        ),
        (whole("Qwen2VL"), {"resample": 9}, "resample 9"),
        (whole("Qwen2VL", image_token_id=None), {}, "image_token_id is None"),
        (MISTRAL, {"size": {"shortest_edge": 9}}, "size is .*; want a longest_edge"),
        (MISTRAL, {"size": -1}, "size is -1; want a longest_edge"),
        (MISTRAL, {"do_center_crop": True}, "do_center_crop is True; want False"),
        (whole("Mistral3", spatial_merge_size="2"), {}, "spatial_merge_size is '2'"),
        (GEMMA, {"do_pan_and_scan": True}, "do_pan_and_scan is True; want False; --limit-mm-per-prompt"),
        (GEMMA, {"size": {"height": 896, "width": 448}}, "want height and width 896, as config.json has it"),
        (GEMMA, {"size": {"longest_edge": 896}}, "size is .*; want height and width 896"),
        (GEMMA | {"mm_tokens_per_image": 250}, {}, "become 250 tokens; want a square of them"),
        (GEMMA | {"mm_tokens_per_image": 9}, {}, "each of as many whole patches"),
        (INTERNVL, {"size": {"height": 384, "width": 384}}, "want height and width 448, as config.json has it"),
        (
            INTERNVL,
            {"min_patches": 7, "max_patches": 6},
            "min_patches is 7 and max_patches 6 .*; want no more of the first",
        ),
        (INTERNVL, {"max_patches": 65}, "min_patches is 1 and max_patches 65 .*, and 64 at most"),
        (INTERNVL, {"max_patches": 0}, "max_patches is 0; want a number of 1 or more"),
        (INTERNVL | {"image_seq_length": 200}, {}, "become 200 tokens; want a square of them"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        rules_of(tmp_path, config, processor)


def test_what_a_processor_says_that_the_model_does_not(tmp_path: Path) -> None:
    write(tmp_path, processor_config={"patch_size": 16})
    with pytest.raises(UnsupportedModel, match=r"patch_size is 16, and .* 14; want the same"):
        rules_of(tmp_path, MISTRAL, {"patch_size": 14})


def test_bounds_of_pixels_for_a_model_with_bounds_of_sides(tmp_path: Path) -> None:
    for config, words in (
        (MISTRAL, "sides; want no such"),
        (GEMMA, "one size"),
        (INTERNVL, "one size; want min_patches"),
    ):
        with pytest.raises(UnsupportedModel, match=f"--mm-processor-kwargs: max_pixels is 100000, and .* {words}"):
            rules_of(tmp_path, config, None, mm_processor_kwargs={"max_pixels": 100_000})
    with pytest.raises(
        UnsupportedModel, match=r"max_patches is 3, and .* bounds of pixels; want min_pixels or max_pixels"
    ):
        rules_of(tmp_path, whole("Qwen3VL"), QWEN3, mm_processor_kwargs={"max_patches": 3})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit_mm_per_prompt": {"image": -1}}, '--limit-mm-per-prompt: "image" is -1; want 0 to'),
        ({"limit_mm_per_prompt": {"video": 1}}, "--limit-mm-per-prompt got"),
        ({"limit_mm_per_prompt": 3}, "--limit-mm-per-prompt got 3"),
        ({"mm_processor_kwargs": {"fps": 2}}, "--mm-processor-kwargs got .*fps"),
        ({"mm_processor_kwargs": {"min_pixels": 0}}, '--mm-processor-kwargs: "min_pixels" is 0'),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 8}}, "min_pixels is 9 and max_pixels 8"),
        ({"mm_processor_kwargs": {"max_patches": 65}}, '"max_patches" is 65; want 1 to 64'),
        ({"allowed_media_domains": ("example.org",)}, "--allowed-media-domains is about the HTTP door"),
        ({"http": "127.0.0.1:1", "allowed_media_domains": ("https://a",)}, "want the name of a host"),
        ({"http": "127.0.0.1:1", "allowed_local_media_path": "/no/such"}, "which is no folder"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(model="x", **settings)


def test_the_engine_takes_images_of_models_whose_encoder_is_known() -> None:
    """It knows no model, and so has names of its own."""
    known = {*KINDS, *_READERS}
    assert set(image_rules._IMAGE_TOKENS) == {name for name, whole in WHOLES.items() if whole.model_type in known}
