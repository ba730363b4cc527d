"""Calls that must come, as grammars: what the library that computes masks lets a model write."""

import json
import re
from typing import Any

import pytest

from grammar_fits import fits, ids_of
from tercet.engine.openai_messages import Function, Tool
from tercet.engine.tool_choice import call_or, find_marks, forced_call
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import Structured


def tool(name: str, **properties: Any) -> dict[str, Any]:
    held = {"type": "object", "required": list(properties), "additionalProperties": False}
    return {"name": name, "parameters": {**held, "properties": properties}}


def grammar_of(tool_format: ToolFormat, *functions: dict[str, Any]) -> Structured:
    tools = [Tool(type="function", function=Function(**function)) for function in functions]
    return forced_call(tools, tool_format, {})


def call(tool_format: ToolFormat, text: str) -> str:
    if tool_format == "hermes":
        return f"<tool_call>\n{text}\n</tool_call>"
    return text.replace('"arguments"', '"parameters"')


async def test_marks_that_are_tokens_have_their_ids() -> None:
    """Also where the tokenizer begins and ends what it reads with tokens of its own."""
    ids = {"<tool_call>": 40, "</think>": 41}

    async def tokenize(text: str) -> list[int]:
        pieces = re.findall("|".join(ids) + "|.", text)
        return [1, *(ids.get(piece) or ord(piece) for piece in pieces), 2]

    assert await find_marks(tokenize) == ids


FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_white_space_is_as_models_have_seen_it_or_none(tool_format: ToolFormat) -> None:
    form = grammar_of(tool_format, tool("f", a={"enum": [1]}, b={"type": "array", "items": {"enum": [2]}}))
    as_seen = json.dumps({"name": "f", "arguments": {"a": 1, "b": [2, 2]}})
    for text in (as_seen, as_seen.replace(" ", "")):
        assert fits(form, call(tool_format, text))
    for before, after in [(":", ":  "), (", ", ",\n"), ("{", "{ "), ("}}", "} }"), ("[", "[ "), (":", " :")]:
        assert not fits(form, call(tool_format, as_seen.replace(before, after)))


@pytest.mark.parametrize("tool_format", FORMATS)
def test_references_lead_where_the_tool_s_own_schema_has_them(tool_format: ToolFormat) -> None:
    one = tool("one", x={"$ref": "#/$defs/X"}, same={"$ref": "#/properties/x"})
    other = tool("other", x={"$ref": "#/definitions/X"}, const={"const": {"$ref": "#/$defs/X"}})
    loop = tool("loop", next={"anyOf": [{"type": "null"}, {"$ref": "#"}]})
    one["parameters"]["$defs"] = {"X": {"enum": [1]}}
    other["parameters"]["definitions"] = {"X": {"enum": [2]}, "default": {"$ref": "#/definitions/X"}}
    other["parameters"]["$id"] = "https://example.com/other"
    form = grammar_of(tool_format, one, other, loop)
    for name, arguments, is_right in [
        ("one", {"x": 1, "same": 1}, True),
        ("one", {"x": 2, "same": 1}, False),
        ("one", {"x": 1, "same": 2}, False),
        ("other", {"x": 2, "const": {"$ref": "#/$defs/X"}}, True),
        ("other", {"x": 1, "const": {"$ref": "#/$defs/X"}}, False),
        ("loop", {"next": {"next": {"next": None}}}, True),
        ("loop", {"next": {"x": 1}}, False),
    ]:
        text = json.dumps({"name": name, "arguments": arguments})
        assert fits(form, call(tool_format, text)) is is_right, text


@pytest.mark.parametrize("tool_format", FORMATS)
def test_arguments_are_an_object_whatever_the_schema_allows_besides(tool_format: ToolFormat) -> None:
    one = {"properties": {"a": {"enum": [1]}}}
    some = {"anyOf": [{"required": ["a"]}, {"type": "array"}], "properties": {"a": {"enum": [1]}}}
    schemas: dict[str, Any] = {"one": one, "some": some, "any": {}, "null": {"type": ["null", "object"]}}
    form = grammar_of(tool_format, *({"name": name, "parameters": schema} for name, schema in schemas.items()))
    for name in schemas:
        for arguments, is_right in [({"a": 1}, True), ([], False), ("a", False), (None, False)]:
            text = json.dumps({"name": name, "arguments": arguments})
            assert fits(form, call(tool_format, text)) is is_right, text


MARKS = ("<tool_call>", "</tool_call>")
ANSWERS = [
    (Structured(json_schema=tool("", a={"enum": [1]})["parameters"]), '{"a":1}', '{"a":2}'),
    (Structured(json_object=True), '{"name":"f"}', "[]"),
    (Structured(regex="<.*>"), "<x>", "x"),
    (Structured(grammar='start: "}" | "{"'), "}", "}{"),
]


@pytest.mark.parametrize("marks", [MARKS, ()])
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS)
def test_a_call_or_an_answer_of_its_form(
    tool_format: ToolFormat, marks: tuple[str, ...], answer: Structured, right: str, wrong: str
) -> None:
    strict, loose = tool("f", a={"enum": [1]}), tool("g", a={"enum": [1]})
    strict["strict"] = True
    tools = [Tool(type="function", function=Function(**function)) for function in (strict, loose)]
    form = call_or(answer, tools, tool_format, ids_of(marks))
    f, g, bad = (
        call(tool_format, json.dumps({"name": name, "arguments": {"a": number}}))
        for name, number in [("f", 1), ("g", 2), ("f", 2)]
    )
    for text in (f, g, right):
        assert fits(form, text, marks), text
    assert fits(form, f"{f}\n{g}", marks) is (tool_format == "hermes")
    assert fits(form, bad, marks) is (fits(answer, bad) and not (marks and tool_format == "hermes"))
    for text in ("Well", wrong, f + right, right + f):
        assert not fits(form, text, marks), text
