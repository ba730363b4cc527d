"""Calls between marks that must come or must be right: what the library that computes masks lets a model write, and
that it is read back."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from grammar_fits import fits, ids_of
from tercet.engine.openai_messages import Function, Tool
from tercet.engine.refusal import Refusal
from tercet.engine.tool_calls import Call, tool_reader
from tercet.engine.tool_choice import call_or, forced_call, loosened, strict_calls
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import Structured
from test_engine_tool_calls import as_glm, as_minimax, as_new_glm, as_qwen

Given = dict[str, str]
WAYS: dict[ToolFormat, Callable[[str, Given], str]] = {
    "qwen3_coder": as_qwen,
    "glm": as_glm,
    "minimax": lambda name, given: as_minimax((name, given)),
}
TOKENS = {
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
}
CASES = [(way, marks) for way, tokens in TOKENS.items() for marks in (tokens, ())]
PROPERTIES: dict[str, Any] = {
    "zone": {"type": "string", "description": "which"},
    "n": {"type": "integer", "minimum": 3},
    "kind": {"enum": ["a", "b c"]},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "point": {"$ref": "#/$defs/Point"},
    "mode": {"anyOf": [{"const": "x"}, {"type": "null"}]},
}
POINT = {"type": "object", "properties": {"x/y": {"type": "number"}}, "required": ["x/y"]}


def tool(name: str, parameters: dict[str, Any] | None, *, strict: bool | None = None) -> Tool:
    return Tool(type="function", function=Function(name=name, parameters=parameters, strict=strict))


def plan(*, closed: bool = True, strict: bool | None = None) -> Tool:
    schema = {"type": "object", "properties": PROPERTIES, "required": ["zone", "n", "kind"], "$defs": {"Point": POINT}}
    return tool("plan", {**schema, **({"additionalProperties": False} if closed else {})}, strict=strict)


ALL = {"zone": "Europe/Zürich", "n": "12", "kind": "b c", "maybe": "null", "point": '{"x/y": 2}', "mode": "x"}
MEANT = {"zone": "Europe/Zürich", "n": 12, "kind": "b c", "maybe": None, "point": {"x/y": 2}, "mode": "x"}
FEW = {"zone": "", "n": "3", "kind": "a"}
RIGHT: list[tuple[Given, dict[str, Any]]] = [
    (ALL, MEANT),
    (FEW, {"zone": "", "n": 3, "kind": "a"}),
    (
        {**FEW, "zone": "if x < 3:\n  '<parameter=a></b>' & <arg_key_>", "mode": "null"},
        {"zone": "if x < 3:\n  '<parameter=a></b>' & <arg_key_>", "n": 3, "kind": "a", "mode": None},
    ),
]
WRONG: list[Given] = [
    {"zone": "x", "n": "12"},
    {"n": "12", "zone": "x", "kind": "a"},
    {**FEW, "n": "2"},
    {**FEW, "n": "twelve"},
    {**FEW, "kind": "c"},
    {**FEW, "mode": "y"},
    {**FEW, "point": "{}"},
    {**FEW, "more": "x"},
    {},
]


@pytest.mark.parametrize(("way", "marks"), CASES)
def test_a_call_that_must_come(way: ToolFormat, marks: tuple[str, ...]) -> None:
    form, write = forced_call([tool("other", None), plan()], way, ids_of(marks)), WAYS[way]
    schemas = {"plan": PROPERTIES}
    for given, meant in RIGHT:
        text = write("plan", given)
        assert fits(form, text, marks), text
        reader = tool_reader(way, schemas)
        (call,) = [*reader.feed(text), *reader.finish()]
        assert isinstance(call, Call)
        assert (call.name, json.loads(call.arguments)) == ("plan", meant)
        assert way != "glm" or fits(form, as_new_glm("plan", given), marks), text
    for given in WRONG:
        assert not fits(form, write("plan", given), marks), given
        assert way != "glm" or not fits(form, as_new_glm("plan", given), marks), given
    assert fits(form, write("other", {}), marks)
    assert fits(form, write("other", {"any": "thing", "at": "all"}), marks)
    for text in ("", "Well.", write("third", {}), write("plan", FEW) + "!", write("plan", FEW) + write("plan", FEW)):
        assert not fits(form, text, marks), text


@pytest.mark.parametrize(("way", "marks"), CASES)
def test_what_a_schema_leaves_open(way: ToolFormat, marks: tuple[str, ...]) -> None:
    for one in (plan(closed=False), loosened(plan())):
        form = forced_call([one], way, ids_of(marks))
        assert fits(form, WAYS[way]("plan", {**FEW, "more": "x"}), marks)


@pytest.mark.parametrize(("way", "marks"), CASES)
def test_any_text_with_calls_that_are_right(way: ToolFormat, marks: tuple[str, ...]) -> None:
    tools, write = [plan(strict=True), tool("other", {"properties": {"a": {"enum": [1]}}})], WAYS[way]
    form = strict_calls(tools, way, ids_of(marks))
    right, bad, loose = write("plan", FEW), write("plan", {**FEW, "n": "x"}), write("other", {"a": "5", "b": "c"})
    for text in ("", "So.", right, f"So: {right}", f"{right}\n{loose} Done.", f"a {loose} b {right}"):
        assert fits(form, text, marks), text
    for text in (bad, f"So: {bad}", f"{right}{bad}", right[:-1]):
        assert not fits(form, text, marks), text
    if way == "glm":
        right, loose, bad = (as_new_glm("plan", FEW), as_new_glm("other", {}), as_new_glm("plan", {}))
        assert fits(form, f"So: {right}{loose} Done.", marks)
        assert not fits(form, f"So: {right}{bad}", marks)
    if way == "minimax":
        assert fits(form, as_minimax(("plan", FEW), ("other", {})), marks)
        assert not fits(form, as_minimax(("other", {}), ("plan", {})), marks)
        alone = strict_calls(tools, way, ids_of(marks), several=False)
        assert not fits(alone, as_minimax(("plan", FEW), ("other", {})), marks)


@pytest.mark.parametrize(("way", "marks"), CASES)
def test_a_call_or_an_answer_of_its_form(way: ToolFormat, marks: tuple[str, ...]) -> None:
    answer, write = Structured(regex="yes|no"), WAYS[way]
    tools = [plan(strict=True), tool("other", None)]
    several, alone = (call_or(answer, tools, way, ids_of(marks), several=more) for more in (True, False))
    one, other = write("plan", FEW), write("other", {})
    both = as_minimax(("plan", FEW), ("other", {})) if way == "minimax" else f"{one}\n{other}"
    assert way != "glm" or fits(several, as_new_glm("plan", FEW) + as_new_glm("other", {}), marks)
    for form in (several, alone):
        for text in ("yes", one, other):
            assert fits(form, text, marks), text
        for text in ("maybe", write("plan", {}), f"{one}yes"):
            assert not fits(form, text, marks), text
    assert fits(several, both, marks)
    assert not fits(alone, both, marks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "has a text 'a' with pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}]}}}, "has a text 'a' with maxLength"),
        ({"properties": {"a<b": {"type": "string"}}}, "has an argument 'a<b', which cannot be written"),
        ({"required": ["a"]}, "requires 'a', which is none of its properties"),
        ({"additionalProperties": {"type": "string"}}, "has a schema for additionalProperties"),
        ({"oneOf": [{"required": ["a"]}]}, "has oneOf"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {}}}, r"has \$ref"),
        ({"properties": ["a"]}, r"has properties \['a'\]"),
        ({"required": "a"}, "has required a"),
        ({"required": [[]]}, r"requires \[\], which is none"),
        ({"": 1}, "has "),
        ({"properties": {"a": {"anyOf": 5}}}, "has a text 'a' with anyOf"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "has a text 'a' with enum"),
    ],
)
def test_what_nothing_can_hold(way: ToolFormat, schema: dict[str, Any], what: str) -> None:
    with pytest.raises(Refusal, match=f"its schema {what}"):
        forced_call([tool("f", schema)], way, {})
