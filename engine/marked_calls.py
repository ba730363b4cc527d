"""Tool calls whose function and arguments stand between marks, each by itself: as Qwen3-Coder, GLM 4.5 and MiniMax-M2
write them.

An argument is text; what it means only its schema tells. Pure; it knows whole calls and no streams.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""Of each function that may be called, its arguments' schemas by their names."""
Marked = tuple[str, dict[str, Any]]
"""A function, and its arguments."""

_QWEN = re.compile(r"<parameter=([^<>\n]+)>\n?"), "</parameter>"
_GLM = re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>"), "</arg_value>"
_MINIMAX = re.compile(r'<parameter name="([^"<>\n]+)">'), "</parameter>"
_Style = tuple[re.Pattern[str], str]
"""What an argument begins with, and ends with."""
_SPELLED = {"True": True, "False": False, "None": None}
"""As models write what they have seen more of in Python."""


def marked_call(body: str, schemas: Schemas) -> Marked | None:
    """What stands between <tool_call> and </tool_call>, if it is a call as Qwen3-Coder or GLM has them."""
    text = body.strip()
    if text.startswith("<function="):
        name, _, rest = text.removeprefix("<function=").partition(">")
        return _call(name.strip(), rest.rstrip().removesuffix("</function>"), _QWEN, schemas)
    name, _, rest = text.partition("<")
    # A word alone is a call only if it names a tool.
    return _call(name.strip(), text[len(name) :], _GLM, schemas) if name.strip() in schemas else None


def invoked_calls(body: str, schemas: Schemas) -> list[Marked]:
    """What stands between <minimax:tool_call> and its end; none if it is anything else than calls."""
    calls, rest = [], body.strip()
    while rest:
        head, _, rest = rest.partition(">")
        match = re.fullmatch(r'<invoke name="([^"<>\n]+)"', head)
        inner, found, rest = rest.partition("</invoke>")
        call = _call(match[1], inner, _MINIMAX, schemas) if match and found else None
        if call is None:
            return []
        calls.append(call)
        rest = rest.lstrip()
    return calls


def _call(name: str, text: str, style: _Style, schemas: Schemas) -> Marked | None:
    known = schemas.get(name, {})
    arguments = {}
    for found in _arguments(text.strip(), style):
        if found is None:
            return None
        argument, value = found
        arguments[argument] = _value(value, known.get(argument))
    return (name, arguments) if name else None


def _arguments(text: str, style: _Style) -> Iterator[tuple[str, str] | None]:
    """Names and texts; None where something else stands."""
    opening, closing = style
    at = 0
    while at < len(text):
        begun = opening.match(text, at)
        end = -1 if begun is None else _end(text, begun.end(), style)
        if begun is None or end < 0:
            yield None
            return
        value = text[begun.end() : end]
        yield begun[1].strip(), value.removesuffix("\n") if style is _QWEN else value
        at = _behind_space(text, end + len(closing))


def _end(text: str, at: int, style: _Style) -> int:
    """Where an argument's text ends; such a mark may also stand in it, and is no end unless a next one begins there."""
    opening, closing = style
    while (at := text.find(closing, at)) >= 0:
        behind = _behind_space(text, at + len(closing))
        if behind == len(text) or opening.match(text, behind):
            return at
        at += len(closing)
    return -1


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _value(text: str, schema: Any) -> Any:
    """As the schema means it; what cannot be so stays text, which the client's own check will meet."""
    kinds, bare = kinds_of(schema), text.strip()
    if not kinds or ("string" in kinds and not ("null" in kinds and bare == "null")):
        return text
    if bare in _SPELLED:
        return _SPELLED[bare]
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        return text


def kinds_of(schema: Any) -> set[str]:
    """What types a value may have; none: nobody says."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {kind for kind in given if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return set().union(*(kinds_of(one) for one in schema[name]))
    values = named_values(schema)
    if isinstance(values, list):
        return {"string" if isinstance(one, str) else "other" for one in values}
    return {"object"} if "$ref" in schema or "allOf" in schema or "properties" in schema else set()


def named_values(schema: Mapping[str, Any]) -> Any:
    """A list of all that a value may be, if the schema is right; None: nobody says."""
    return [schema["const"]] if "const" in schema else schema.get("enum")
