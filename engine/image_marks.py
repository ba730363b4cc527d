"""What is written around an image in the text of a prompt, where a model has that: Gemma 3 and 4, InternVL.

A template writes one word for an image; what prepares prompts writes more in its place, and all of it becomes tokens
together, line breaks with those of the text around. The words are read from the tokenizer's files, once, at start.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_breaks import added_tokens
from tercet.engine.image_settings import TEXT_ALONE
from tercet.engine.json_file import read_object

_FIELDS = {"boi_token_index": 255_999, "eoi_token_index": 256_000}
"""Of config.json: ids of what stands ahead of an image and behind, and what they are where it is silent."""
_FOURTHS = {"boi_token_id": 255_999, "eoi_token_id": 258_882}
"""The same of Gemma 4."""
_NAMES = {"start_image_token": "<img>", "end_image_token": "</img>"}
"""The same of a tokenizer's settings, which have the words themselves."""


class Marks(NamedTuple):
    """Texts."""

    word: str
    """Keeps an image's place in a template's text, or a client's."""
    written: str
    """In its stead. It has the token that becomes as many as the image has."""


def read_gemmas_marks(folder: Path, whole: Mapping[str, Any], token_id: int) -> Marks | None:
    """Those of the checkpoint in this folder; `token_id`: what stands for an image. None: it has no tokenizer. Raises
    `UnsupportedModel`."""
    if (names := _added(folder)) is None:
        return None
    ids = {field: whole.get(field, usual) for field, usual in _FIELDS.items()} | {"image_token_index": token_id}
    begin, end, place = (_word(folder, names, number, field) for field, number in ids.items())
    return Marks(begin, f"\n\n{begin}{place}{end}\n\n")


def read_gemma_4s_marks(folder: Path, whole: Mapping[str, Any], token_id: int) -> Marks | None:
    """The same. What stands for an image keeps its place, too."""
    if (names := _added(folder)) is None:
        return None
    ids = {field: whole.get(field, usual) for field, usual in _FOURTHS.items()} | {"image_token_id": token_id}
    begin, end, place = (_word(folder, names, number, field) for field, number in ids.items())
    return Marks(place, f"{begin}{place}{end}")


def read_internvls_marks(folder: Path, token_id: int) -> Marks | None:
    """The same. What stands for an image keeps its place, too."""
    if (names := _added(folder)) is None:
        return None
    place = _word(folder, names, token_id, "image_token_id")
    said = read_object(folder / "tokenizer_config.json")
    nested = said.get("extra_special_tokens")
    said = said | (nested if isinstance(nested, dict) else {})
    if (other := said.get("context_image_token", place)) != place:
        text = f"{folder}: context_image_token of its tokenizer is {other!r}, and image_token_id names {place!r}"
        raise UnsupportedModel(f"{text}; want the same{TEXT_ALONE}")
    begin, end = (said.get(field, usual) for field, usual in _NAMES.items())
    for field, word in zip(_NAMES, (begin, end), strict=True):
        if word not in names.values():
            raise UnsupportedModel(_missing(folder, word, field))
    return Marks(place, f"{begin}{place}{end}")


def _added(folder: Path) -> dict[int, Any] | None:
    """Added tokens of its tokenizer by their ids. None: it has none."""
    files = [folder / name for name in ("tokenizer_config.json", "tokenizer.json")]
    if not any(file.exists() for file in files):
        return None
    return {number: name for file in files for number, name in added_tokens(file)}


def _word(folder: Path, names: Mapping[int, Any], number: object, field: str) -> str:
    word = names.get(number) if isinstance(number, int) else None
    if not isinstance(word, str):
        raise UnsupportedModel(_missing(folder, number, field))
    return word


def _missing(folder: Path, token: object, field: str) -> str:
    return f"{folder}: its tokenizer has no added token {token!r} ({field}); want one{TEXT_ALONE}"
