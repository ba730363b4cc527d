"""The form of an answer with a call that must come, or calls that must be right, for each way of writing calls.

It knows the notation of grammars and no HTTP.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tercet.engine.harmony import MARKS as HARMONY_MARKS
from tercet.engine.harmony_forms import any_messages, call_rules, final_message
from tercet.engine.http_errors import ApiError
from tercet.engine.lark import Marks, in_lark, named
from tercet.engine.marked_forms import MARKS as MARKS_WITHIN
from tercet.engine.marked_forms import STYLES, marked_rules
from tercet.engine.openai_messages import Tool
from tercet.engine.reasoning import CHANNEL
from tercet.engine.section_calls import DEEPSEEK, KIMI
from tercet.engine.section_forms import section_rules
from tercet.engine.tool_schemas import of_arguments, of_call, of_calls
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import Structured

_OPENINGS: dict[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "glm": "<tool_call>",
    "minimax": "<minimax:tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral_named": "[TOOL_CALLS]",
    "deepseek": DEEPSEEK.opening,
    "deepseek_fenced": DEEPSEEK.opening,
    "kimi": KIMI.opening,
}
"""What a call begins with, where that is a mark."""
_CLOSINGS: dict[ToolFormat, str] = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>",
    "glm": "</tool_call>",
    "minimax": "</minimax:tool_call>",
    "deepseek": DEEPSEEK.closing,
    "deepseek_fenced": DEEPSEEK.closing,
    "kimi": KIMI.closing,
}
"""What calls end with, where that is a mark: text may follow, and more of them."""
_EACH_CLOSED = ("hermes", "qwen3_coder", "glm")
"""Of those, where each call has such marks to itself."""
_STRAY = ("</tool_call>", "</minimax:tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", *CHANNEL[:2])
"""Marks that a text may have anywhere, whatever the model means by them."""
_OPENING_MARKS = ("<tool_call>", "<minimax:tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
MARKS = (*_OPENING_MARKS, *_STRAY, *MARKS_WITHIN, *DEEPSEEK, *KIMI, *HARMONY_MARKS)
"""Of all formats, of reasoning as well."""


def chosen(tools: Sequence[Tool], name: str) -> list[Tool]:
    """The one of that name."""
    found = [tool for tool in tools if tool.function.name == name]
    if not found:
        raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    return found


def loosened(tool: Tool) -> Tool:
    """To be called with any object."""
    return msgspec.structs.replace(tool, function=msgspec.structs.replace(tool.function, parameters={"type": "object"}))


def forced_call(tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks) -> Structured:
    """One call of any of the tools."""
    return Structured(
        grammar=f"start: {_opening(tool_format, marks)} calls\n{_calls(tools, tool_format, marks, several=False)}"
    )


def strict_calls(tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks, *, several: bool = True) -> Structured:
    """Any text, with calls or without; a call of a tool that is strict has the arguments that its schema wants.

    Where they have an end there may be `several` in any case: text may follow a call, and calls that.
    """
    if tool_format == "harmony":
        return any_messages(_held(tools), marks)
    opening = _OPENINGS.get(tool_format)
    if opening is None:
        raise ApiError(
            400,
            f"tools has one that is strict, which is not supported beside tool_choice auto where calls are written as "
            f"{tool_format} does; want strict false, or tool_choice required",
            param="tools",
        )
    others = [f"text {named(mark, marks)}" for mark in _STRAY if mark in marks]
    ways = ["spelled calls"] + [f"text {named(opening, marks)} calls"] * (opening in marks)
    if tool_format in _CLOSINGS:
        start = f"({' | '.join(others + ways)})* text"
    else:  # behind calls there is nothing
        start = f"({' | '.join(others)})* " * bool(others) + f"({' | '.join(ways)} | text)"
    calls = _calls(_held(tools), tool_format, marks, several=several and tool_format not in _EACH_CLOSED)
    return Structured(
        grammar=f"start: {start}\n"
        "text: /(.|\\n)*/\n"
        # Lazy: the first that can be one is one.
        f"spelled[lazy]: /(.|\\n)*{re.escape(opening)}/\n{calls}"
    )


def call_or(
    answer: Structured, tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks, *, several: bool = True
) -> Structured:
    """Calls of tools, those of strict ones as their schemas want them, or what `answer` allows. Raises `Refusal`."""
    calls = _calls(_held(tools), tool_format, marks, several=several)
    answer = final_message(answer, marks) if tool_format == "harmony" else answer
    return Structured(
        grammar=f"start: {_opening(tool_format, marks)} calls | answer\nanswer: {in_lark(answer)}\n{calls}"
    )


def _held(tools: Sequence[Tool]) -> list[Tool]:
    """As they are held to where none has to be called."""
    return [tool if tool.function.strict else loosened(tool) for tool in tools]


def _opening(tool_format: ToolFormat, marks: Marks) -> str:
    """As part of a rule."""
    opening = _OPENINGS.get(tool_format)
    return "" if opening is None else named(opening, marks)


def _calls(tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks, *, several: bool) -> str:
    """The rule `calls`, and what it needs: a call of any of the tools, from after its opening on.

    If `several` may come, more behind it; of Llama 3 and harmony there is one.
    """
    opening = _opening(tool_format, marks)
    match tool_format:
        case "hermes":
            more = f' ("\\n" {opening} call)*' if several else ""
            call = f'call: "\\n" json "\\n" {named("</tool_call>", marks)}\njson: {_json(of_call(tools))}\n'
            return f"calls: call{more}\n{call}"
        case "llama3":
            return f"calls: {_json(of_call(tools, 'parameters'))}\n"
        case "mistral":
            return f"calls: / ?/ {_json(of_calls(tools, most=None if several else 1))}\n"
        case "mistral_named":
            more = f" ({opening} call)*" if several else ""
            return f"calls: call{more}\n{_named_call(tools, marks)}"
        case "qwen3_coder" | "glm" | "minimax":
            if tool_format in _EACH_CLOSED:
                between = r"/\n?/" if tool_format == "glm" else r'"\n"'  # GLM's newer models have none
                more = f" ({between} {opening} marked)*" if several else ""
                calls = f"calls: marked{more}\n"
            else:
                closing = named(_CLOSINGS[tool_format], marks)
                calls = f'calls: "\\n" marked{"+" if several else ""} {closing}\n'
            return calls + marked_rules(tools, STYLES[tool_format], marks)
        case "deepseek" | "deepseek_fenced" | "kimi":
            return section_rules(tools, tool_format, marks, several=several)
        case "harmony":  # which ends an answer with a call
            return call_rules(tools, marks)
        case "none" | "gemma":
            raise AssertionError("calls of a model that has no way to write any")


def _named_call(tools: Sequence[Tool], marks: Marks) -> str:
    """The rule `call`: whether an id stands before the arguments and a mark before them, the model knows best."""
    ways = [f"{json.dumps(tool.function.name)} args args_{place}" for place, tool in enumerate(tools)]
    id_first = f"({named('[CALL_ID]', marks)} /[a-zA-Z0-9]{{9}}/)? " if "[CALL_ID]" in marks else ""
    schemas = [f"args_{place}: {_json(of_arguments(tool))}\n" for place, tool in enumerate(tools)]
    return f"call: {' | '.join(ways)}\nargs: {id_first}{named('[ARGS]', marks)}?\n{''.join(schemas)}"


def _json(schema: dict[str, Any]) -> str:
    """As part of a rule."""
    return "%json " + json.dumps(schema)
