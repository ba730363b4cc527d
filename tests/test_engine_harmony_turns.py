"""Conversations for templates of the harmony format: nothing is left out; and how a model is known to speak it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harmony_style import TEMPLATE, harmony_checkpoint
from tercet.engine.chat_template import ChatTemplate, TemplateRefused
from tercet.engine.config import EngineConfig
from tercet.engine.front_desk import FrontDesk
from tercet.engine.harmony_turns import described, harmony_turns
from tercet.engine.reception import Reception
from tercet.engine.rules import make_rules
from tercet.engine.text_codec import load_codec
from tercet.ipc.messages import ChatMessage, ChatOptions
from tercet.ipc.process_messages import Limits

HI = {"role": "user", "content": "hi"}


def call(name: str) -> dict[str, Any]:
    return {"type": "function", "id": name, "function": {"name": name, "arguments": {}}}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"of {name}", "tool_call_id": name}


def test_each_call_has_a_turn_and_what_came_of_it() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [call("f"), call("g")], "reasoning_content": "Hm."}
    turns = harmony_turns([HI, calling, result("g"), result("x"), result("f"), HI, {**calling, "content": "So:"}])
    thought = {"role": "assistant", "reasoning_content": "Hm.", "thinking": "Hm."}
    assert turns == [
        HI,
        {**thought, "tool_calls": [call("f")]},
        result("f"),
        {"role": "assistant", "tool_calls": [call("g")]},
        result("g"),
        result("x"),
        HI,
        {**thought, "thinking": "Hm.\n\nSo:", "tool_calls": [call("f")]},
        {"role": "assistant", "tool_calls": [call("g")]},
    ]


def test_thoughts_and_texts_without_calls() -> None:
    said = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    assert harmony_turns([HI, said, {"role": "assistant", "content": "No"}]) == [
        HI,
        {**said, "thinking": "Hm."},
        {"role": "assistant", "content": "No"},
    ]
    assert harmony_turns([{"role": "system", "content": ""}]) == []


def test_tools_have_a_description() -> None:
    tools = [{"function": {"name": "f"}}, {"function": {"name": "g", "description": "G"}}, {"type": "function"}]
    assert list(described(tools)) == [{"function": {"name": "f", "description": ""}}, *tools[1:]]


@pytest.mark.parametrize("effort", ["none", "utmost", True, 3])
def test_an_effort_that_the_model_has_not_learned(effort: Any) -> None:
    with pytest.raises(TemplateRefused, match=f"reasoning_effort is {effort}; want low, medium or high"):
        ChatTemplate(TEMPLATE, {}).render(
            [ChatMessage("user", "x")], ChatOptions(template_kwargs={"reasoning_effort": effort})
        )


@pytest.mark.parametrize(
    ("settings", "formats"),
    [
        ({}, ("harmony", "harmony")),
        ({"tool_call_parser": "none"}, ("none", "harmony")),
        ({"tool_call_parser": "hermes"}, ("hermes", "none")),
        ({"reasoning_parser": "none"}, ("none", "none")),
        ({"reasoning_parser": "think"}, ("harmony", "harmony")),
    ],
)
def test_it_is_read_as_a_whole_or_not_at_all(tmp_path: Path, settings: Any, formats: tuple[str, str]) -> None:
    codec = load_codec(harmony_checkpoint(tmp_path))
    rules = make_rules(codec, Limits(9, 64, 264, "float32", "cpu", 8), EngineConfig(model="tiny"))
    unshown = replace(codec, template=ChatTemplate("{{ messages }}", {}))
    for known, given, wanted in (
        (codec, settings, formats),
        (unshown, {"tool_call_parser": "harmony"}, ("harmony", "harmony")),
    ):
        info = Reception(FrontDesk(known.pieces), known, rules, EngineConfig(model="tiny", **given)).info()
        assert (info.tool_format, info.reasoning_format) == wanted
