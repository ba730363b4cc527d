"""Words by which some models tell an image's rows apart: Pixtral's processor writes them behind each row.

Their ids are read from the tokenizer's files, once, at start.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tercet.engine.errors import UnsupportedModel
from tercet.engine.image_settings import TEXT_ALONE
from tercet.engine.json_file import read_object

_NAMES = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
"""Fields of processor_config.json, and what they say where they are silent."""


class Breaks(NamedTuple):
    """Such words, by their ids."""

    between: int
    behind: int
    """The last row."""


_TEKKENS = Breaks(12, 13)
"""Of Mistral's own vocabulary: what a folder without a tokenizer, which serves ids only, is about."""


def read_breaks(folder: Path) -> Breaks:
    """Those of the checkpoint in this folder. Raises `UnsupportedModel`."""
    said = read_object(folder / "processor_config.json")
    files = [folder / name for name in ("tokenizer_config.json", "tokenizer.json")]
    if not any(file.exists() for file in files):
        return _TEKKENS
    ids = []
    for field, usual in _NAMES.items():
        name = usual if said.get(field) is None else said[field]
        found = next((token_id for file in files for token_id, token in added_tokens(file) if token == name), None)
        if found is None:
            raise UnsupportedModel(
                f"{folder}: its tokenizer has no added token {name!r} ({field}); want one{TEXT_ALONE}"
            )
        ids.append(found)
    return Breaks(*ids)


def added_tokens(file: Path) -> Iterator[tuple[int, Any]]:
    """Tokens that are no part of a vocabulary, and their ids; by either file's form."""
    content = read_object(file)
    by_id, listed = content.get("added_tokens_decoder"), content.get("added_tokens")
    entries = [(key, token) for key, token in by_id.items()] if isinstance(by_id, dict) else []
    entries += (
        [(token.get("id"), token) for token in listed if isinstance(token, dict)] if isinstance(listed, list) else []
    )
    for token_id, token in entries:
        if isinstance(token, dict) and str(token_id).isdecimal():
            yield int(token_id), token.get("content")
