"""JSON in what a model has written, of which nobody knows whether it is any. Pure."""

import json
from typing import Any


def parsed(text: str) -> Any:
    """The whole; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON that begins there, and its end; None if there is none, and the text's end."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text)


def is_text(value: str) -> bool:
    """Half of a character, which an escape can be, is none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
