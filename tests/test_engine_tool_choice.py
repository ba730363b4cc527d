"""Calls that must come, as grammars: what the library that computes masks lets a model write."""

import json
import re
from typing import Any

import pytest

from grammar_fits import fits, ids_of
from tercet.engine.mark_tokens import find_marks
from tercet.engine.openai_messages import Function, Tool
from tercet.engine.tool_choice import call_or, forced_call, strict_calls
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import Structured


def tool(name: str, **properties: Any) -> dict[str, Any]:
    held = {"type": "object", "required": list(properties), "additionalProperties": False}
    return {"name": name, "parameters": {**held, "properties": properties}}


def grammar_of(tool_format: ToolFormat, *functions: dict[str, Any]) -> Structured:
    tools = [Tool(type="function", function=Function(**function)) for function in functions]
    return forced_call(tools, tool_format, {})


def call(tool_format: ToolFormat, text: str) -> str:
    match tool_format:
        case "hermes":
            return f"<tool_call>\n{text}\n</tool_call>"
        case "mistral":
            return f"[TOOL_CALLS][{text}]"
        case "mistral_named":
            return re.sub(r'(?s)\{ ?"name" ?: *"(.*?)",\s*"arguments" ?: *(.*)\}', r"[TOOL_CALLS]\1[ARGS]\2", text)
    return text.replace('"arguments"', '"parameters"')


def calls(tool_format: ToolFormat, one: str, other: str) -> str:
    match tool_format:
        case "mistral":
            return call(tool_format, f"{one}, {other}")
        case "mistral_named":
            return call(tool_format, one) + call(tool_format, other)
    return f"{call(tool_format, one)}\n{call(tool_format, other)}"


async def test_marks_that_are_tokens_have_their_ids() -> None:
    """Also where the tokenizer begins and ends what it reads with tokens of its own."""
    ids = {"<tool_call>": 40, "</think>": 41}

    async def tokenize(text: str) -> list[int]:
        pieces = re.findall("|".join(ids) + "|.", text)
        return [1, *(ids.get(piece) or ord(piece) for piece in pieces), 2]

    assert await find_marks(tokenize, [*ids, "[ARGS]"]) == ids


FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3", "mistral", "mistral_named")


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


MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
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
    one, other, third = (
        json.dumps({"name": name, "arguments": {"a": number}}) for name, number in [("f", 1), ("g", 2), ("f", 2)]
    )
    f, g, bad = (call(tool_format, text) for text in (one, other, third))
    for text in (f, g, right):
        assert fits(form, text, marks), text
    assert fits(form, calls(tool_format, one, other), marks) is (tool_format != "llama3")
    assert not fits(form, calls(tool_format, one, third), marks)
    assert fits(form, bad, marks) is (fits(answer, bad) and not (marks and tool_format == "hermes"))
    for text in ("Well", wrong, f + right, right + f):
        assert not fits(form, text, marks), text


TEXTS = ("", "Well.\n", "Let me see: [TOOL_CALL <tool_cal ")
ONE, OTHER, LOOSE, BAD = (
    json.dumps({"name": name, "arguments": {"a": value}})
    for name, value in [("f", 1), ("f", 2), ("g", [3]), ("f", "<tool_call>[TOOL_CALLS]")]
)


@pytest.mark.parametrize(("marks", "special"), [(MARKS, True), (MARKS, False), ((), False)])
@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "mistral_named"])
def test_any_text_with_calls_that_are_right(tool_format: ToolFormat, marks: tuple[str, ...], special: bool) -> None:
    strict, loose = tool("f", a={"enum": [1, 2]}), tool("g", a={"enum": [1]})
    strict["strict"] = True
    tools = [Tool(type="function", function=Function(**function)) for function in (strict, loose)]
    form = strict_calls(tools, tool_format, ids_of(marks))

    def right(text: str) -> bool:
        return fits(form, text, marks, special=special)

    one, bad = call(tool_format, ONE), call(tool_format, BAD)
    for before in TEXTS:
        assert right(before)
        assert right(before + one)
        assert right(before + call(tool_format, LOOSE))
        assert right(before + calls(tool_format, ONE, OTHER))
        assert not right(before + bad)
        assert not right(before + calls(tool_format, ONE, BAD))
        assert not right(before + one[:-1])
        assert right(before + one + "Done.") is (tool_format == "hermes")
        assert right(f"[THINK]{before}[/THINK]{before}{one}")
        assert not right(f"[THINK]{before}[/THINK]{before}{bad}")


@pytest.mark.parametrize("tool_format", ["mistral", "mistral_named"])
def test_one_call_where_several_are_not_wanted(tool_format: ToolFormat) -> None:
    tools = [Tool(type="function", function=Function(**tool("f", a={"enum": [1, 2]})))]
    forms = [
        strict_calls(tools, tool_format, {}, several=False),
        call_or(Structured(regex="x"), tools, tool_format, {}, several=False),
    ]
    for form in forms:
        assert fits(form, call(tool_format, ONE))
        assert not fits(form, calls(tool_format, ONE, OTHER))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("marks", [("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]",), ()])
def test_what_mistral_s_models_write_around_a_call(marks: tuple[str, ...], special: bool) -> None:
    function = tool("get.time-1", a={"enum": [1]})
    tools = [Tool(type="function", function=Function(**one)) for one in (function, tool("get"))]
    has_ids = "[CALL_ID]" in marks
    samples: dict[ToolFormat, dict[str, bool]] = {
        "mistral": {
            '[{"name": "get.time-1", "arguments": {"a": 1}}]': True,
            ' [{"name":"get","arguments":{},"id":"abcDEF123"}]': True,
            '[{"name": "get", "arguments": {}, "id": "abc"}]': False,
            '[{"name": "get", "arguments": {}}, {"name": "get", "arguments": {}}]': False,
            '  [{"name": "get", "arguments": {}}]': False,
            '{"name": "get", "arguments": {}}': False,
            '[{"arguments": {}, "name": "get"}]': False,
            "[]": False,
            "get[ARGS]{}": False,
        },
        "mistral_named": {
            'get.time-1[ARGS]{"a": 1}': True,
            'get.time-1{"a":1}': True,
            "get[ARGS]{}": True,
            "get{}": True,
            "get[CALL_ID]abcDEF123[ARGS]{}": has_ids,
            "get[CALL_ID]abc[ARGS]{}": False,
            'get[ARGS]{"a": 1}': False,
            "get.time-1[ARGS]{}": False,
            "get[ARGS][ARGS]{}": False,
            "get[ARGS]{} ": False,
            "get[ARGS]{}[TOOL_CALLS]get[ARGS]{}": False,
            "set[ARGS]{}": False,
            '[{"name": "get", "arguments": {}}]': False,
        },
    }
    for tool_format, texts in samples.items():
        form = forced_call(tools, tool_format, ids_of(marks))
        for text, is_right in texts.items():
            assert fits(form, f"[TOOL_CALLS]{text}", marks, special=special) is is_right, text
            assert not fits(form, text, marks, special=special)
