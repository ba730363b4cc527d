"""JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from tercet.engine.errors import UnsupportedModel


def read_json(file: Path) -> Any:
    """Whatever it holds; `UnsupportedModel` names a file that cannot be read."""
    try:
        content = json.loads(file.read_bytes())
        json.dumps(content, ensure_ascii=False).encode()  # halves of characters, which JSON may name, are no text
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} cannot be read as JSON: {error}") from None


def read_object(file: Path) -> dict[str, Any]:
    """An object; nothing where there is no file."""
    content = read_json(file) if file.exists() else {}
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{file} holds a {type(content).__name__}; want an object")
    return content
