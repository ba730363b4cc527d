"""Calls whose function and arguments stand between marks, as rules of a grammar: those that `marked_calls.py` reads.

An argument of a text is anything up to its end mark, or one of some texts; one of another type is JSON. Arguments come
in the order of the schema, those that need not be there or not. What a schema wants beyond that, nothing here can hold.
Pure; it knows the notation of grammars and no HTTP.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tercet.engine.lark import Marks, in_slashes, named
from tercet.engine.marked_calls import kinds_of, named_values
from tercet.engine.openai_messages import Tool
from tercet.engine.refusal import Refusal, short
from tercet.engine.tool_schemas import of_argument
from tercet.ipc.answers import ToolFormat


class Style(NamedTuple):
    """How a call is written, names in place of {}, with white space as models have seen it. Marks may be tokens.

    Where `_MAYBE_LINE` stands, some models of the family end a line, as their templates do, and others do not.
    """

    head: str
    argument: str
    value_end: str
    tail: str


_CLOSING, _MAYBE_LINE = "</tool_call>", "\1"
STYLES: Mapping[ToolFormat, Style] = {
    "qwen3_coder": Style("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", f"</function>\n{_CLOSING}"),
    "glm": Style(
        "{}",
        f"{_MAYBE_LINE}<arg_key>{{}}</arg_key>{_MAYBE_LINE}<arg_value>",
        "</arg_value>",
        f"{_MAYBE_LINE}{_CLOSING}",
    ),
    "minimax": Style('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"),
}
MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_ANY_NAME = "\0"
_OF_OBJECTS = ("type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions")
_OF_TEXTS = ("type", "title", "description", "default", "examples", "enum", "const")
"""Keywords that are held to, or say nothing."""


def marked_rules(tools: Sequence[Tool], style: Style, marks: Marks) -> str:
    """The rule `marked`, a call of any of the tools, and what it needs."""
    calls, rules = [], []
    for place, tool in enumerate(tools):
        parts = [_written(style.head.format(tool.function.name), marks)]
        for index, (name, schema, must) in enumerate(_arguments(tool)):
            rule = f"arg_{place}_{index}"
            opening = _written(style.argument.format(name), marks)
            rules.append(f"{rule}: {opening} {_value(tool, name, schema, style, marks)}")
            parts.append(rule if must else f"{rule}?")
        if _takes_more(tool):
            parts.append("other*")
        calls.append(" ".join([*parts, _written(style.tail, marks)]))
    other = f"other: {_written(style.argument.format(_ANY_NAME), marks)} {_text(style, marks)}"
    return "\n".join([f"marked: {' | '.join(calls)}", *rules, other, *_text_rules(style, marks), ""])


def _arguments(tool: Tool) -> Iterator[tuple[str, Any, bool]]:
    """Their names and schemas, and whether each must come."""
    schema = _schema(tool)
    required, properties = schema.get("required", ()), schema.get("properties", {})
    if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
        raise _unheld(f"requires {missing[0]!r}, which is none of its properties")
    for name, one in properties.items():
        if re.search(r'[<>"\n]', name) or not name:
            raise _unheld(f"has an argument {name!r}, which cannot be written between marks")
        yield name, one, name in required


def _takes_more(tool: Tool) -> bool:
    more = _schema(tool).get("additionalProperties", True)
    if isinstance(more, dict) and more:
        raise _unheld("has a schema for additionalProperties")
    return more is not False


def _schema(tool: Tool) -> Mapping[str, Any]:
    schema = tool.function.parameters or {}
    if strange := [keyword for keyword in schema if keyword not in _OF_OBJECTS and keyword[:1] != "$"]:
        raise _unheld(f"has {strange[0]}")
    if "$ref" in schema:
        raise _unheld("has $ref")
    for keyword, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(keyword, kind()), kind):
            raise _unheld(f"has {keyword} {short(schema[keyword])}")
    return schema


def _value(tool: Tool, name: str, schema: Any, style: Style, marks: Marks) -> str:
    """What an argument may be, and its end."""
    kinds = kinds_of(schema)
    if kinds and "string" not in kinds:
        return f"%json {json.dumps(of_argument(tool, name))} {_written(style.value_end, marks)}"
    texts = _texts(name, schema)
    if texts is None:
        return _text(style, marks)
    if not texts:
        raise _unheld(f"has an argument {name!r} that may be no text")
    return f"({' | '.join(_written(text + style.value_end, marks) for text in texts)})"


def _texts(name: str, schema: Any) -> list[str] | None:
    """Those that an argument may be which can be a text; None: any."""
    if not isinstance(schema, Mapping):
        return None
    branches = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(branches, list):
        found = [_texts(name, one) for one in branches]
        return None if None in found else [text for texts in found for text in texts or ()]
    strange = [keyword for keyword in schema if keyword not in _OF_TEXTS]
    if strange or not isinstance(schema.get("enum", []), list):
        raise _unheld(f"has a text {name!r} with {[*strange, 'enum'][0]}")
    kinds = kinds_of(schema)
    if kinds and "string" not in kinds:
        return ["null"] if kinds == {"null"} else []
    values = named_values(schema)
    return None if values is None else [value for value in values if isinstance(value, str)]


def _text(style: Style, marks: Marks) -> str:
    """Any text, and its end."""
    return "spoken" if not _is_token(style, marks) else f"free {_written(style.value_end, marks)}"


def _text_rules(style: Style, marks: Marks) -> list[str]:
    if _is_token(style, marks):
        return ["free: /(.|\\n)*/"]
    to_end = in_slashes("(.|\n)*" + re.escape(style.value_end))
    return [f"spoken[lazy]: {to_end}"]  # the first end is the end


def _is_token(style: Style, marks: Marks) -> bool:
    return any(mark in style.value_end for mark in marks)


def _written(text: str, marks: Marks) -> str:
    """As part of a rule: its marks by their ids, and what is between them in one piece: of pieces that may come the
    longest is taken, whatever follows it."""
    known = [mark for mark in (_CLOSING, *MARKS) if mark in marks]
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
    return " ".join(named(piece, marks) if piece in known else _spelled(piece) for piece in pieces if piece)


def _spelled(text: str) -> str:
    if _ANY_NAME not in text and _MAYBE_LINE not in text:
        return json.dumps(text)
    written = re.escape(text).replace(re.escape(_ANY_NAME), r'[^<>"\n]+')
    return in_slashes(written.replace(re.escape(_MAYBE_LINE), r"\n?"))


def _unheld(what: str) -> Refusal:
    return Refusal("invalid_request", f"its schema {what}")
