"""The form of an answer with a call that must come, or calls that must be right, for each way of writing calls.

It knows JSON schemas and no HTTP.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tercet.engine.http_errors import ApiError
from tercet.engine.lark import Marks, in_lark, named
from tercet.engine.openai_messages import Tool
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import Structured

Tokenize = Callable[[str], Awaitable[list[int]]]
_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_SPACING = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
"""As models have seen calls written, or closer; as much white space as they like could be all that max_tokens holds."""
_DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema with values that are no schemas."""
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values are schemas by any names, which are no keywords."""


async def find_marks(tokenize: Tokenize) -> Marks:
    """Those that are tokens of their own: a grammar has to name them, and takes no such token for its spelling."""
    marks = {}
    for mark in _MARKS:
        # What the tokenizer adds, such as a beginning of sequence, is there both times.
        added = Counter(await tokenize(mark * 2)) - Counter(await tokenize(mark))
        if added.total() == 1:
            (marks[mark],) = added
    return marks


def chosen(tools: Sequence[Tool], name: str) -> list[Tool]:
    """The one of that name."""
    found = [tool for tool in tools if tool.function.name == name]
    if not found:
        raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    return found


def loosened(tool: Tool) -> Tool:
    """To be called with any object."""
    return msgspec.structs.replace(tool, function=msgspec.structs.replace(tool.function, parameters={"type": "object"}))


def bare_call(tools: Sequence[Tool], key: str = "arguments") -> Structured:
    """The JSON of a call of any of the tools, with whatever schemas they have."""
    return Structured(grammar=f"start: %json {json.dumps(_schema(tools, key))}\n")


def forced_call(tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks) -> Structured:
    """One call of any of the tools."""
    match tool_format:
        case "hermes":
            opening, call = named("<tool_call>", marks), _call(tools, marks)
            return Structured(grammar=f"start: {opening} call\n{call}")
        case "llama3":
            return bare_call(tools, "parameters")
        case _:
            raise ApiError(
                400,
                f"tool_choice forces a call, which is not supported where calls are written as {tool_format} does; "
                "want auto or none",
                param="tool_choice",
            )


def strict_calls(tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks) -> Structured:
    """Any text, with calls or without; a call of a tool that is strict has the arguments that its schema wants."""
    if tool_format != "hermes":
        raise ApiError(
            400,
            f"tools has one that is strict, which is not supported beside tool_choice auto where calls are written as "
            f"{tool_format} does; want strict false, or tool_choice required",
            param="tools",
        )
    ways = [
        "spelled call",
        *(f"text {named(mark, marks)}" + " call" * (mark == "<tool_call>") for mark in _MARKS if mark in marks),
    ]
    return Structured(
        grammar=f"start: ({' | '.join(ways)})* text\n"
        "text: /(.|\\n)*/\n"
        "spelled[lazy]: /(.|\\n)*<tool_call>/\n" + _call(_held(tools), marks)  # lazy: the first that can be one is one
    )


def call_or(answer: Structured, tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks) -> Structured:
    """Calls of tools, those of strict ones as their schemas want them, or what `answer` allows. Raises `Refusal`."""
    held, otherwise = _held(tools), f"answer: {in_lark(answer)}\n"
    match tool_format:
        case "hermes":
            call = f"{named('<tool_call>', marks)} call"
            return Structured(grammar=f'start: {call} ("\\n" {call})* | answer\n{otherwise}{_call(held, marks)}')
        case "llama3":
            schema = json.dumps(_schema(held, "parameters"))
            return Structured(grammar=f"start: call | answer\n{otherwise}call: %json {schema}\n")
        case _:
            raise ApiError(
                400,
                "tools came with a form for the answer, and a call beside it is not supported where calls are written "
                f"as {tool_format} does; want tool_choice none, or one of them",
                param="tools",
            )


def _held(tools: Sequence[Tool]) -> list[Tool]:
    """As they are held to where none has to be called."""
    return [tool if tool.function.strict else loosened(tool) for tool in tools]


def _call(tools: Sequence[Tool], marks: Marks) -> str:
    """The rule for a call of one of the tools, from after its opening mark."""
    schema = json.dumps(_schema(tools, "arguments"))
    return f'call: "\\n" json "\\n" {named("</tool_call>", marks)}\njson: %json {schema}\n'


def _schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """Of the JSON of a call. Each tool's own schema has a place of its own, where its references look for it."""
    definitions: dict[str, Any] = {}
    calls = []
    for place, tool in enumerate(tools):
        parameters = dict(tool.function.parameters or {"type": "object", "properties": {}})
        parameters.pop("$id", None)  # "#" would be relative to it
        root = f"#/$defs/{place}"
        definitions[str(place)] = _moved(parameters, root)
        calls.append(
            {
                "type": "object",
                # An object even where the schema does not say so: nobody takes anything else for a call's arguments.
                "properties": {"name": {"const": tool.function.name}, key: {"type": "object", "$ref": root}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions, "x-guidance": _SPACING}


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
