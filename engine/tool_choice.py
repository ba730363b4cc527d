"""A call that must come: the form that an answer then has, for each way of writing calls.

It knows JSON schemas and no HTTP.
"""

import json
from collections.abc import Sequence
from typing import Any

from tercet.engine.http_errors import ApiError
from tercet.engine.openai_messages import Tool
from tercet.ipc.messages import Structured, ToolFormat


def forced_call(tools: Sequence[Tool], name: str | None, tool_format: ToolFormat) -> Structured:
    """One call of any of the tools, or of the one that is named."""
    chosen = [tool for tool in tools if name is None or tool.function.name == name]
    if not chosen:
        raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    match tool_format:
        case "hermes":
            schema = json.dumps(_schema(chosen, "arguments"))
            return Structured(grammar=f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n')
        case "llama3":
            return Structured(json_schema=_schema(chosen, "parameters"))
        case _:
            raise ApiError(
                400,
                f"tool_choice forces a call, which is not supported where calls are written as {tool_format} does; "
                "want auto or none",
                param="tool_choice",
            )


def _schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """Of the JSON of a call; what the tools' own schemas define moves to where their references look for it."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object", "properties": {}})
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ApiError(400, f"tools define {name!r} in two ways; want different names", param="tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, key: parameters},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}
