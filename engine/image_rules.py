"""What a checkpoint wants of images: which token keeps their place in a prompt, and how large they become.

Read from its files, once, at start; what looks at images is the worker's (`model/`), which reads the rest. Pure but for
that: it opens no image.
"""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tercet.engine.config import EngineConfig
from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_breaks import Breaks, read_breaks
from tercet.engine.image_fields import agreed, eye_of, is_whole, processor_of, side_of
from tercet.engine.image_marks import Marks, read_gemma_4s_marks, read_gemmas_marks, read_internvls_marks
from tercet.engine.image_settings import MOST_TILES, TEXT_ALONE, ProcessorSettings
from tercet.engine.image_sizes import OneSize, PixelBounds, SideBounds, SizeBounds, Tiles, TokenBound
from tercet.engine.json_file import read_object

_PIXTRAL, _GEMMA = "Mistral3ForConditionalGeneration", "Gemma3ForConditionalGeneration"
_INTERNVL, _GEMMA_4 = "InternVLForConditionalGeneration", "Gemma4ForConditionalGeneration"
_GLMS = {
    f"{name}ForConditionalGeneration": token
    for name, token in (("Glm4v", 151343), ("Glm46V", 151343), ("Glm4vMoe", 151363))
}
_IMAGE_TOKENS = {
    "Qwen2VLForConditionalGeneration": 151655,
    "Qwen2_5_VLForConditionalGeneration": 151655,
    "Qwen3VLForConditionalGeneration": 151655,
    "Qwen3VLMoeForConditionalGeneration": 151655,
    "Qwen3_5ForConditionalGeneration": 248056,
    "Qwen3_5MoeForConditionalGeneration": 248056,
    _PIXTRAL: 10,
    _GEMMA: 262144,
    _GEMMA_4: 258880,
    _INTERNVL: 151667,
    **_GLMS,
}
"""The architectures that see, and the id that stands for an image where config.json is silent, as in transformers."""
_PIXELS = 56 * 56, 28 * 28 * 1280
"""Where no file says how many: at least and at most."""
_GLMS_PIXELS = 112 * 112, 28 * 28 * 15000
"""Of all frames."""
_PIXTRALS_SIDE = 1024
"""The same of a family that bounds sides."""
_BILINEAR, _BICUBIC = 2, 3
_WAYS = range(6)
_ONLY = {"do_resize": True, "do_center_crop": False, "do_pan_and_scan": False}
_ONLY_OF_TILES = {"do_resize": True}
"""Whose image processor does not read the others."""


@dataclass(frozen=True)
class ImageRules:
    """Of one checkpoint."""

    token_id: int
    """One of these in a prompt keeps an image's place."""
    patch_size: int
    """Pixels of a patch's side."""
    merge_size: int
    """So many patches along each side of a square are one token."""
    sizes: SizeBounds
    resample: int = _BICUBIC
    """How Pillow makes another size, by its number."""
    breaks: Breaks | None = None
    marks: Marks | None = None

    @property
    def factor(self) -> int:
        """Pixels along the side of a token."""
        return self.patch_size * self.merge_size

    def written(self, text: str) -> str:
        """A prompt's, with all that the model wants around images."""
        return text if self.marks is None else text.replace(self.marks.word, self.marks.written)

    def tokens(self, height: int, width: int) -> "array[int]":
        """What a prompt has of an image of its final size: a token for each place, row by row, and what stands between
        these."""
        rows, columns = height // self.factor, width // self.factor
        if self.breaks is None:
            return array("i", [self.token_id]) * (rows * columns)
        told = array("i", [*[self.token_id] * columns, self.breaks.between]) * rows
        told[-1] = self.breaks.behind
        return told

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that the model gets an image in. Raises `ValueError` for what is stretched too far."""
        return self.sizes.final_size(height, width, self.factor)

    @property
    def most_seen(self) -> int:
        """Tokens of an image, but for words between its rows."""
        return self.sizes.most_tokens(self.factor)


def load_image_rules(model_path: Path, config: EngineConfig) -> ImageRules | None:
    """None: this checkpoint sees nothing, or is not to. Raises `UnsupportedModel`."""
    if model_path.is_file() or not config.sees:
        return None
    whole = read_object(model_path / "config.json")
    architectures = whole.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(name, str) or name not in _IMAGE_TOKENS:
        return None
    if name == _GEMMA_4 and not eye_of(whole):
        return None
    file, said = processor_of(model_path)
    for field, only in (_ONLY_OF_TILES if name == _INTERNVL else _ONLY).items():
        if said.get(field) not in (only, None):
            raise UnsupportedModel(f"{file}: {field} is {said[field]!r}; want {only}{TEXT_ALONE}")
    token_id = whole.get("image_token_id", whole.get("image_token_index", _IMAGE_TOKENS[name]))
    resample = said.get("resample", _BILINEAR if name == _GEMMA else _BICUBIC)
    if not is_whole(token_id) or not is_whole(resample) or resample not in _WAYS:
        text = f"image_token_id is {token_id!r} and resample {resample!r}; want whole numbers, this to {_WAYS[-1]}"
        raise UnsupportedModel(f"{model_path}: {text}{TEXT_ALONE}")
    sizes: SizeBounds
    if name == _PIXTRAL:
        sides, sizes = _pixtrals_sides(model_path, whole), _side_bounds(file, said, config)
        return ImageRules(token_id, *sides, sizes, resample, read_breaks(model_path))
    if name == _GEMMA:
        marks = read_gemmas_marks(model_path, whole, token_id)
        return ImageRules(token_id, *_siglips_sides(model_path, whole, file, said, config), resample, marks=marks)
    if name == _INTERNVL:
        marks = read_internvls_marks(model_path, token_id)
        return ImageRules(token_id, *_internvits_sides(model_path, whole, file, said, config), resample, marks=marks)
    if name == _GEMMA_4:
        marks = read_gemma_4s_marks(model_path, whole, token_id)
        return ImageRules(token_id, *_gemma_4s_sides(model_path, whole, file, said, config), resample, marks=marks)
    sides = _qwens_sides(model_path, whole, file, said)
    if name in _GLMS:
        frames = _frames(model_path, whole, file, said)
        by_new_name = {"size": said.get("size")}  # its image processor knows no others
        pixels = _pixel_bounds(file, by_new_name, config, _GLMS_PIXELS, frames, enlarges=True)
        return ImageRules(token_id, *sides, pixels, resample)
    return ImageRules(token_id, *sides, _pixel_bounds(file, said, config, _PIXELS), resample)


def _qwens_sides(folder: Path, whole: Mapping[str, Any], file: Path, said: Mapping[str, Any]) -> tuple[int, int]:
    """Of a patch in pixels, of a token in patches."""
    config = folder / "config.json"
    eye = eye_of(whole)
    patch = agreed((eye.get("patch_size"), config, "patch_size"), (said.get("patch_size"), file, "patch_size"), 14)
    seen = eye.get("spatial_merge_size"), config, "spatial_merge_size"
    return patch, agreed(seen, (said.get("merge_size"), file, "merge_size"), 2)


def _frames(folder: Path, whole: Mapping[str, Any], file: Path, said: Mapping[str, Any]) -> int:
    """How often a picture is there in a patch."""
    name = "temporal_patch_size"
    return agreed((eye_of(whole).get(name), folder / "config.json", name), (said.get(name), file, name), 2)


def _pixtrals_sides(folder: Path, whole: Mapping[str, Any]) -> tuple[int, int]:
    """The same: what the processor says, which tells what prepares images how large a token is."""
    config, file = folder / "config.json", folder / "processor_config.json"
    said = read_object(file)
    patch, merge = "patch_size", "spatial_merge_size"
    return (
        agreed((eye_of(whole).get(patch), config, patch), (said.get(patch), file, patch), 16),
        agreed((whole.get(merge), config, merge), (said.get(merge), file, merge), 2),
    )


def _siglips_sides(
    folder: Path, whole: Mapping[str, Any], file: Path, said: Mapping[str, Any], config: EngineConfig
) -> tuple[int, int, OneSize]:
    """The same, and what all images become."""
    _check_kwargs(config, "one size")
    where, eye = folder / "config.json", eye_of(whole)
    patch = side_of(eye.get("patch_size"), where, "patch_size") or 16
    side = side_of(eye.get("image_size"), where, "image_size") or 224
    tokens = side_of(whole.get("mm_tokens_per_image"), where, "mm_tokens_per_image") or 256
    _check_square(file, said, side)
    length = math.isqrt(tokens)
    if length**2 != tokens or side % (patch * length):
        text = f"{where}: images of {side} pixels a side with patches of {patch} become {tokens} tokens"
        raise UnsupportedModel(f"{text}; want a square of them, each of as many whole patches{TEXT_ALONE}")
    return patch, side // patch // length, OneSize(side, side)


def _gemma_4s_sides(
    folder: Path, whole: Mapping[str, Any], file: Path, said: Mapping[str, Any], config: EngineConfig
) -> tuple[int, int, TokenBound]:
    """The same, and how many tokens an image may have."""
    _check_kwargs(config, "a bound of tokens")
    where, eye = folder / "config.json", eye_of(whole)
    patch, merge = (
        agreed((eye.get(name), where, name), (said.get(name), file, name), usual)
        for name, usual in (("patch_size", 16), ("pooling_kernel_size", 3))
    )
    return patch, merge, TokenBound(side_of(said.get("max_soft_tokens"), file, "max_soft_tokens") or 280)


def _internvits_sides(
    folder: Path, whole: Mapping[str, Any], file: Path, said: Mapping[str, Any], config: EngineConfig
) -> tuple[int, int, Tiles]:
    """The same of tiles. Whether there are several is the processor's matter, in transformers, whatever
    crop_to_patches says."""
    _check_kwargs(config, "tiles of one size", "min_patches", "max_patches")
    where, eye, name = folder / "config.json", eye_of(whole), "image_seq_length"
    patch = side_of(eye.get("patch_size"), where, "patch_size") or 14
    side = side_of(eye.get("image_size"), where, "image_size") or 448
    _check_square(file, said, side)
    processor = folder / "processor_config.json"
    tokens = agreed((whole.get(name), where, name), (read_object(processor).get(name), processor, name), 256)
    length = math.isqrt(tokens)
    if length**2 != tokens or side % (patch * length):
        text = f"{where}: tiles of {side} pixels a side with patches of {patch} become {tokens} tokens"
        raise UnsupportedModel(f"{text}; want a square of them, each of as many whole patches{TEXT_ALONE}")
    asked = config.mm_processor_kwargs or ProcessorSettings()
    least = asked.min_patches or side_of(said.get("min_patches"), file, "min_patches") or 1
    most = asked.max_patches or side_of(said.get("max_patches"), file, "max_patches") or 12
    if not least <= most <= MOST_TILES:
        text = f"min_patches is {least} and max_patches {most} ({file.name}, --mm-processor-kwargs)"
        raise UnsupportedModel(f"{text}; want no more of the first, and {MOST_TILES} at most{TEXT_ALONE}")
    return patch, side // patch // length, Tiles(side, least, most)


def _check_square(file: Path, said: Mapping[str, Any], side: int) -> None:
    given = said.get("size")
    if given not in (None, side, {"height": side, "width": side}):
        raise UnsupportedModel(
            f"{file}: size is {given!r}; want height and width {side}, as config.json has it{TEXT_ALONE}"
        )


def _pixel_bounds(
    file: Path, said: Mapping[str, Any], config: EngineConfig, usual: tuple[int, int], frames: int = 1, *,
    enlarges: bool = False,
) -> PixelBounds:  # fmt: skip
    """At least and at most: as the operator says of a picture, else as the file does under its older names, or its
    newer."""
    _check_kwargs(config, "bounds of pixels", "min_pixels", "max_pixels")
    size = said.get("size")
    size = dict(zip(("shortest_edge", "longest_edge"), usual, strict=True)) if size is None else size
    if not isinstance(size, Mapping):
        raise UnsupportedModel(f"{file}: size is {size!r}; want shortest_edge and longest_edge{TEXT_ALONE}")
    found, settings = [], config.mm_processor_kwargs or ProcessorSettings()
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        asked = getattr(settings, old)
        value = None if asked is None else asked * frames
        for one in (said.get(old), size.get(new), size.get(old)):
            value = one if value is None else value
        if not is_whole(value) or value < 1:
            raise UnsupportedModel(f"{file}: {new} of size is {value!r}; want a number of pixels{TEXT_ALONE}")
        found.append(value)
    least, most = found
    if least > most:
        raise UnsupportedModel(
            f"images are to have at least {least} pixels and at most {most} ({file.name}, --mm-processor-kwargs); want "
            "no more of the first"
        )
    return PixelBounds(least, most, frames, enlarges)


def _side_bounds(file: Path, said: Mapping[str, Any], config: EngineConfig) -> SideBounds:
    """The longest side, or both."""
    _check_kwargs(config, "bounds of sides")
    size = said.get("size", _PIXTRALS_SIDE)
    if isinstance(size, Mapping):
        longest = size.get("longest_edge")
        sides = [longest or size.get("height"), longest or size.get("width")]
    else:
        sides = [size, size]
    height, width = sides
    if not is_whole(height) or not is_whole(width) or min(height, width) < 1:
        raise UnsupportedModel(f"{file}: size is {size!r}; want a longest_edge of 1 or more{TEXT_ALONE}")
    return SideBounds(height, width)


def _check_kwargs(config: EngineConfig, wanted: str, *fields: str) -> None:
    """What an operator says is of this kind of model: only `fields`."""
    said = {} if config.mm_processor_kwargs is None else msgspec.structs.asdict(config.mm_processor_kwargs)
    for name, value in said.items():
        if value is not None and name not in fields:
            text = f"--mm-processor-kwargs: {name} is {value}, and images of this model have {wanted}"
            raise UnsupportedModel(f"{text}; want {' or '.join(fields) or 'no such flag'}")
