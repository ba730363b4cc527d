"""What is written around an image in the text of a prompt, where a model has that: Gemma 3.

A template writes one word for an image; what prepares prompts writes more in its place, and all of it becomes tokens
together, line breaks with those of the text around. The words are read from the tokenizer's files, once, at start.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_breaks import added_tokens
from tercet.engine.image_settings import TEXT_ALONE

_FIELDS = {"boi_token_index": 255_999, "eoi_token_index": 256_000}
"""Of config.json: ids of what stands ahead of an image and behind, and what they are where it is silent."""


class Marks(NamedTuple):
    """Texts."""

    word: str
    """Keeps an image's place in a template's text, or a client's."""
    written: str
    """In its stead. It has the token that becomes as many as the image has."""


def read_marks(folder: Path, whole: Mapping[str, Any], token_id: int) -> Marks | None:
    """Those of the checkpoint in this folder; `token_id`: what stands for an image. None: it has no tokenizer. Raises
    `UnsupportedModel`."""
    files = [folder / name for name in ("tokenizer_config.json", "tokenizer.json")]
    if not any(file.exists() for file in files):
        return None
    names = {number: name for file in files for number, name in added_tokens(file)}
    ids = {field: whole.get(field, usual) for field, usual in _FIELDS.items()} | {"image_token_index": token_id}
    words = []
    for field, number in ids.items():
        word = names.get(number) if isinstance(number, int) else None
        if not isinstance(word, str):
            text = f"{folder}: its tokenizer has no added token {number!r} ({field}); want one"
            raise UnsupportedModel(f"{text}{TEXT_ALONE}")
        words.append(word)
    begin, end, place = words
    return Marks(begin, f"\n\n{begin}{place}{end}\n\n")
