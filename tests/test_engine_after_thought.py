"""Forms that begin where the model's reasoning ends: what the library that computes masks makes of them."""

import json

import pytest

from grammar_fits import fits, ids_of
from tercet.engine.after_thought import after_thought
from tercet.engine.openai_messages import Function, Tool
from tercet.engine.reasoning import BRACKETS
from tercet.engine.refusal import Refusal
from tercet.engine.structured_check import check_compiles
from tercet.engine.tool_choice import forced_call, strict_calls
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import Structured

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = Tool(type="function", function=Function(name="f", parameters=SCHEMA, strict=True))
CALLS: dict[ToolFormat, str] = {
    "hermes": '<tool_call>\n{"name":"f","arguments":{"a":1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name":"f","arguments":{"a":1}}]',
    "mistral_named": '[TOOL_CALLS]f[ARGS]{"a":1}',
}
FORMS: list[tuple[Structured, list[str], list[str]]] = [
    (Structured(json_object=True), ['{"b":[]}', "{}"], ["[]", "{} "]),
    (Structured(json_schema=SCHEMA), ['{"a":1}'], ['{"a":\n\n1}', "{}"]),
    (Structured(json_schema=json.dumps(SCHEMA)), ['{"a":1}'], ["{}"]),
    (Structured(regex="[/a]/\\/\n\\\n."), ["///\n\n.", "a//\n\nx"], ["a/\n\n."]),
    (Structured(choice=("a/b", "(c)\n", "\\n")), ["a/b", "(c)\n", "\\n"], ["c", "\n", "a"]),
    (Structured(grammar='start: "a" b\nb: "}{"'), ["a}{"], ["a}"]),
]


@pytest.mark.parametrize("marks", [MARKS, ()])
def test_any_thought_and_then_the_form(marks: tuple[str, ...]) -> None:
    known = ids_of(marks)
    calls = [
        (make([TOOL], tool_format, known), [call], [call.replace("1", "x")])
        for make in (forced_call, strict_calls)
        for tool_format, call in CALLS.items()
    ]
    for form, good, bad in [*FORMS, *calls]:
        later = after_thought(form, known, opened=True)
        for text in good:
            assert fits(form, text, marks)
            for thought in ("</think>", "\nHm, {</thin\n\n</think>\n\n", '{"a":1}</think> '):
                assert fits(later, thought + text, marks), thought + text
            assert not fits(later, text, marks)
        for text in bad:
            assert not fits(later, f"Hm.</think>{text}", marks), text


@pytest.mark.parametrize("marks", [MARKS, MARKS[:1], MARKS[1:], ()])
def test_a_thought_that_the_model_opens_or_does_not(marks: tuple[str, ...]) -> None:
    known = ids_of(marks)
    for form, good, bad in FORMS:
        later = after_thought(form, known, opened=False)
        for text in good:
            for thought in ("", "<think></think>", "<think>\nHm, {</thin\n\n</think>\n\n", '<think>{"a":1}</think> '):
                assert fits(later, thought + text, marks), thought + text
            for thought in ("Hm.</think>", "</think>", "<think>", "<think>Hm.</think>\n\n\n\n\n"):
                assert not fits(later, thought + text, marks), thought + text
        for text in bad:
            assert not fits(later, text, marks), text
            assert not fits(later, f"<think>Hm.</think>{text}", marks), text


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("marks", [BRACKETS[:2], BRACKETS[:1], ()])
def test_a_thought_between_other_tags(marks: tuple[str, ...], opened: bool) -> None:
    form, opening = Structured(json_schema=SCHEMA), "" if opened else "[THINK]"
    later = after_thought(form, ids_of(marks), opened=opened, tags=BRACKETS)
    for thought in ("[/THINK]", "\nHm, [/THIN </think>\n\n[/THINK]\n\n", '{"a":1}[/THINK] '):
        assert fits(later, f'{opening}{thought}{{"a":1}}', marks, special=True), thought
    assert fits(later, '{"a":1}', marks) != opened
    for wrong in ("Hm.</think>", "Hm.[/THINK][/THINK]", "Hm."):
        assert not fits(later, f'{opening}{wrong}{{"a":1}}', marks, special=True), wrong


def test_the_gap_ends() -> None:
    form = after_thought(Structured(choice=("x",)), {}, opened=True)
    assert fits(form, "</think>\n\n\n\nx")
    assert not fits(form, "</think>\n\n\n\n\nx")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Structured(), "structured is empty"),
        (Structured(regex="x", choice=("y",)), "regex and choice; want one of"),
        (Structured(json_schema="{"), "no JSON"),
        (Structured(json_schema="3"), "want an object"),
        (Structured(json_schema="[" * 60_000), "no JSON"),
        (Structured(json_schema='{"not":' * 50 + "{}" + "}" * 50), "at most 32 levels"),
        (Structured(json_schema={"x-guidance": 3}), "x-guidance is 3"),
    ],
)
def test_what_is_no_form(form: Structured, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        after_thought(form, {}, opened=True)


def test_a_keyword_that_cannot_be_held_is_refused() -> None:
    loose = {"not": {"const": 3}, "x-guidance": {"lenient": True}}
    with pytest.raises(Refusal, match='"not"'):
        check_compiles(after_thought(Structured(json_schema=loose), {}, opened=True))
