"""Where a checkpoint's files say what they want of images, and sizes that they name: read, or refused.

Knows files and fields; what these mean for a family is in `image_rules.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_settings import TEXT_ALONE
from tercet.engine.json_file import read_object

_Side = tuple[object, Path, str]
"""What is given, where, and by which name."""


def eye_of(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the encoder."""
    eye = whole.get("vision_config")
    return eye if isinstance(eye, Mapping) else {}


def processor_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """What prepares images, and where that is written; as in transformers, the newer file counts."""
    nested = read_object(folder / "processor_config.json").get("image_processor")
    if isinstance(nested, dict):
        return folder / "processor_config.json", nested
    file = folder / "preprocessor_config.json"
    return file, read_object(file)


def agreed(seen: _Side, prepared: _Side, default: int) -> int:
    """What two files say of the same, or one of them."""
    first, second = side_of(*seen), side_of(*prepared)
    if first is not None and second is not None and first != second:
        text = f"{prepared[1]}: {prepared[2]} is {second}, and {seen[2]} of config.json {first}"
        raise UnsupportedModel(f"{text}; want the same{TEXT_ALONE}")
    return second or first or default


def side_of(value: object, file: Path, name: str) -> int | None:
    """Some files give both of a square."""
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if value is None:
        return None
    if not is_whole(value) or value < 1:
        raise UnsupportedModel(f"{file}: {name} is {value!r}; want a number of 1 or more{TEXT_ALONE}")
    return value


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
