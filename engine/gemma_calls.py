"""Tool calls as Gemma 4 writes them: `call:name{key:value,…}`, where a text stands between marks and keys are bare.

Pure; it knows whole calls and no streams.
"""

import json
import re
from typing import Any

from tercet.engine.found_json import parsed

GEMMA_OPENING, GEMMA_CLOSING = "<|tool_call>", "<tool_call|>"
_QUOTE = re.escape('<|"|>')
_CALL = re.compile(r"\s*call:\s*([\w.-]{1,256})\s*(\{.*\})\s*", re.DOTALL)
_UNLIKE_JSON = re.compile(
    rf'{_QUOTE}(?P<text>.*?){_QUOTE}|(?P<json>"(?:[^"\\]|\\.)*")|(?P<key>[^\s{{}}\[\],:<>"]+)(?=\s*:)|\bNone\b',
    re.DOTALL,
)
"""`None`: the template writes it where a call of an earlier turn has null."""


def gemma_call(body: str) -> tuple[str, Any] | None:
    """A name and its arguments, of what stands between the marks of one call."""
    found = _CALL.fullmatch(body)
    return None if found is None else (found[1], parsed(_UNLIKE_JSON.sub(_as_json, found[2])))


def _as_json(found: re.Match[str]) -> str:
    if found["json"] is not None:
        return found["json"]
    text = found["text"] if found["text"] is not None else found["key"]
    return "null" if text is None else json.dumps(text)
