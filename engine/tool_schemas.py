"""JSON schemas of calls, made of the schemas that tools have for their arguments.

Pure; it knows no grammar and no HTTP.
"""

from collections.abc import Sequence
from typing import Any

from tercet.engine.openai_messages import Tool

_SPACING = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
"""As models have seen calls written, or closer; as much white space as they like could be all that max_tokens holds."""
_DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema with values that are no schemas."""
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values are schemas by any names, which are no keywords."""
_ID = {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"}
"""Of a call, where a model gives it one."""


def of_call(tools: Sequence[Tool], key: str = "arguments") -> dict[str, Any]:
    """An object with the name of one of the tools, and under `key` its arguments."""
    return {"anyOf": _calls(tools, key, {}), **_around(tools)}


def of_calls(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    """A list of such objects, at least one. They may have ids."""
    limit = {} if most is None else {"maxItems": most}
    calls = {"anyOf": _calls(tools, "arguments", {"id": _ID})}
    return {"type": "array", "items": calls, "minItems": 1, **limit, **_around(tools)}


def of_arguments(tool: Tool) -> dict[str, Any]:
    """The arguments alone."""
    return {**_arguments(0), **_around([tool])}


def of_argument(tool: Tool, name: str) -> dict[str, Any]:
    """One of them by itself."""
    pointer = name.replace("~", "~0").replace("/", "~1")
    return {"$ref": f"{_root(0)}/properties/{pointer}", **_around([tool])}


def _calls(tools: Sequence[Tool], key: str, more: dict[str, Any]) -> list[dict[str, Any]]:
    """`more`: properties that a call may have besides."""
    return [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, key: _arguments(place), **more},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]


def _arguments(place: int) -> dict[str, Any]:
    """An object even where the tool's schema does not say so: nobody takes anything else for a call's arguments."""
    return {"type": "object", "$ref": _root(place)}


def _around(tools: Sequence[Tool]) -> dict[str, Any]:
    """Each tool's own schema has a place of its own, where its references look for it."""
    definitions = {}
    for place, tool in enumerate(tools):
        parameters = dict(tool.function.parameters or {"type": "object", "properties": {}})
        parameters.pop("$id", None)  # "#" would be relative to it
        definitions[str(place)] = _moved(parameters, _root(place))
    return {"$defs": definitions, "x-guidance": _SPACING}


def _root(place: int) -> str:
    return f"#/$defs/{place}"


def _moved(schema: Any, root: str) -> Any:
    """A schema whose own root has become `root`."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for keyword, value in schema.items():
        if keyword in _DATA:
            moved[keyword] = value
        elif keyword in _BY_NAME and isinstance(value, dict):
            moved[keyword] = {name: _moved(one, root) for name, one in value.items()}
        elif keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[keyword] = root + value[1:]
        else:
            moved[keyword] = _moved(value, root)
    return moved
