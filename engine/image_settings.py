"""What an operator says of images: how many a request may bring, how large they become. Names as vLLM has them.

It knows settings; what a checkpoint wants is in `image_rules.py`.
"""

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

_MOST_IMAGES = 256
_MOST_PIXELS = 2**28
MOST_TILES = 64
"""Of an image, but for the small one of all of it."""
_LIMIT, _KWARGS = "--limit-mm-per-prompt", "--mm-processor-kwargs"
TEXT_ALONE = f"; {_LIMIT} '{{\"image\": 0}}' serves text alone"
"""What to do where something is wrong with images, and they are not needed."""
_Settings = TypeVar("_Settings", "ImageLimits", "ProcessorSettings")


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of each kind a request may bring."""

    image: int = 16
    """0: none, and what looks at images is not loaded."""
    video: Literal[0] = 0
    audio: Literal[0] = 0


class ProcessorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many pixels images have when the model sees them, or how many tiles; None: as the checkpoint has it."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    min_patches: int | None = None
    """Tiles, as image processors call them."""
    max_patches: int | None = None


def image_limits(given: object) -> ImageLimits | None:
    """From what a flag or a program says: such limits, or a map of them. ValueError names what is wrong."""
    if given is None:
        return None
    limits = _read(given, ImageLimits, _LIMIT, '{"image": 8}')
    _check(f'{_LIMIT}: "image"', limits.image, 0, _MOST_IMAGES)
    return limits


def processor_settings(given: object) -> ProcessorSettings | None:
    """The same of sizes."""
    if given is None:
        return None
    settings = _read(given, ProcessorSettings, _KWARGS, '{"min_pixels": 65536, "max_pixels": 1048576}')
    for what, most in (("pixels", _MOST_PIXELS), ("patches", MOST_TILES)):
        low, high = (getattr(settings, f"{end}_{what}") for end in ("min", "max"))
        for end, value in (("min", low), ("max", high)):
            if value is not None:
                _check(f'{_KWARGS}: "{end}_{what}"', value, 1, most)
        if (low or 1) > (high or most):
            raise ValueError(f"{_KWARGS}: min_{what} is {low} and max_{what} {high}; want no more of the first")
    return settings


def check_media(domains: tuple[str, ...], folder: str | None, http: str | None) -> None:
    """Refuse, with a `ValueError`, what is no host, what is no folder, and what nobody could ask for."""
    for name, given in (("--allowed-media-domains", domains), ("--allowed-local-media-path", folder)):
        if given and http is None:
            raise ValueError(f"{name} is about the HTTP door, and there is none; want --http HOST:PORT as well")
    for domain in domains:
        if not domain or any(letter in domain for letter in "/:@*? ") or not domain.isascii():
            raise ValueError(f"--allowed-media-domains got {domain!r}; want the name of a host, as in example.org")
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"--allowed-local-media-path got {folder!r}, which is no folder; want one")


def _read(given: object, kind: type[_Settings], flag: str, example: str) -> _Settings:
    if isinstance(given, kind):
        return given
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{flag} got {given!r}: {error}; want such as {example}") from None


def _check(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{what} is {value}; want {low} to {high}")
