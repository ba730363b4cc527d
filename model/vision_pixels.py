"""How a checkpoint that sees wants its pixels: what its files say, but for sizes, which are the tokenizer's matter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.model.config_json import read_object

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""What red, green and blue from 0 to 1 are shifted by, and then divided by."""
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""CLIP's, which many have taken over."""
HALVES: Normalisation = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""From -1 to 1."""


def image_settings(folder: Path) -> Mapping[str, Any]:
    """What the folder says of how images are prepared: versions of transformers write it to two places."""
    for file, inside in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        try:
            settings = read_object(folder / file)
        except FileNotFoundError:
            continue
        found = settings if inside is None else settings.get(inside)
        if isinstance(found, Mapping):
            return found
    return {}


def normalisation(images: Mapping[str, Any], defaults: Normalisation) -> Normalisation:
    """Of such settings, or raise."""
    for name, only in (("do_rescale", True), ("do_normalize", True), ("rescale_factor", 1 / 255)):
        if (value := images.get(name, only)) != only and value is not None:
            raise ValueError(f"preprocessor_config.json: {name} is {value!r}; supported: {only!r}")
    found = []
    for name, default in zip(("image_mean", "image_std"), defaults, strict=True):
        value = default if images.get(name) is None else images[name]
        wanted = "three numbers over 0" if name == "image_std" else "three numbers"
        fits = isinstance(value, list | tuple) and all(isinstance(one, int | float) for one in value)
        if not fits or len(value) != 3 or (name == "image_std" and min(value) <= 0):
            raise ValueError(f"preprocessor_config.json: {name} is {value!r}; want {wanted}")
        found.append(tuple(map(float, value)))
    return found[0], found[1]
