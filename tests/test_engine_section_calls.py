"""Calls in sections: how templates show them, what the library that computes masks lets a model write, and that it is
read back; and a conversation with Kimi's ids through the HTTP door, where the test plays the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from grammar_fits import fits, ids_of
from http_process import http_process
from section_style import FENCED, KIMI, PLAIN, as_fenced, as_kimi, as_plain
from tercet.engine.answer_formats import answer_formats
from tercet.engine.chat_reader import ChatReader
from tercet.engine.chat_template import ChatTemplate
from tercet.engine.config import EngineConfig
from tercet.engine.openai_messages import Function, Tool
from tercet.engine.section_calls import DEEPSEEK
from tercet.engine.section_calls import KIMI as KIMI_SECTION
from tercet.engine.tool_calls import Call, tool_reader
from tercet.engine.tool_choice import call_or, forced_call, strict_calls
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import ChatMessage, FunctionCall, Structured, ToolCall
from test_engine_http_tools import TOOL, chat
from test_engine_tool_calls import cuts
from tokenizer_process import byte_checkpoint, tokenizer_process

SPECIAL = {"bos_token": "<s>"}
WAYS: dict[ToolFormat, Callable[..., str]] = {"deepseek": as_plain, "deepseek_fenced": as_fenced, "kimi": as_kimi}
SECTIONS = {"deepseek": DEEPSEEK, "deepseek_fenced": DEEPSEEK, "kimi": KIMI_SECTION}
CASES = [(way, marks) for way in WAYS for marks in (SECTIONS[way], ())]
ONE, OTHER, LOOSE, BAD = ("get", '{"a": 1}'), ("get", '{"a":2}'), ("get.time-1", '{"b": [1]}'), ("get", '{"a": "1"}')


def tools(*, strict: bool | None = None) -> list[Tool]:
    held = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    return [
        Tool(type="function", function=Function(name="get", parameters=held, strict=strict)),
        Tool(type="function", function=Function(name="get.time-1", parameters={"type": "object"})),
    ]


@pytest.mark.parametrize(
    ("source", "formats"),
    [
        (FENCED, ("deepseek_fenced", "think_opened")),
        (FENCED.replace("<think>", ""), ("deepseek_fenced", "think")),
        (PLAIN, ("deepseek", "think_on_request")),
        (KIMI, ("kimi", "none")),
    ],
)
def test_templates_show_how_calls_are_written(source: str, formats: tuple[str, str]) -> None:
    template = ChatTemplate(source, SPECIAL)
    assert (template.tool_format, template.reasoning_format) == formats
    way: ToolFormat = "kimi" if source == KIMI else "deepseek"
    assert answer_formats(template, EngineConfig(model="demo", tool_call_parser=way)) == formats
    other = EngineConfig(model="demo", tool_call_parser="hermes")
    assert answer_formats(template, other)[0] == "hermes"


@pytest.mark.parametrize(
    ("source", "way"),
    [
        (FENCED, as_fenced),
        (FENCED.replace("m.content if m.content is not none else ''", "m.content.strip()"), as_fenced),
        (PLAIN, as_plain),
        (PLAIN.replace("m.content if m.content is not none else ''", "m.content.strip()"), as_plain),
        (KIMI, as_kimi),
        (KIMI.replace("c.function.arguments | tojson", "c.function.arguments"), as_kimi),
    ],
)
def test_turns_with_calls_are_shown_as_the_model_wrote_them(source: str, way: Callable[..., str]) -> None:
    """Whether the template takes arguments as an object or as JSON, and no text as nothing or as an empty one."""
    call = ToolCall(id="functions.f:0", function=FunctionCall("f", {"x": "Zürich", "y": [1]}))
    turns = [
        ChatMessage("user", "hi"),
        ChatMessage("assistant", tool_calls=(call,)),
        ChatMessage("tool", "7", tool_call_id=call.id),
    ]
    written = way(("f", '{"x": "Zürich", "y": [1]}'))
    for one in (source, source.replace("tools", "no_tools")):
        assert written in ChatTemplate(one, SPECIAL).render(turns)


@pytest.mark.parametrize(("way", "marks"), CASES)
def test_a_call_that_must_come(way: ToolFormat, marks: tuple[str, ...]) -> None:
    form, write = forced_call(tools(), way, ids_of(marks)), WAYS[way]
    for name, arguments in (ONE, OTHER, LOOSE):
        text = write((name, arguments))
        assert fits(form, text, marks, special=name == "get"), text
        reader = tool_reader(way, {})
        (call,) = [*reader.feed(text), *reader.finish()]
        assert isinstance(call, Call)
        assert (call.name, json.loads(call.arguments)) == (name, json.loads(arguments))
    one = write(ONE)
    for text in ("", "Well.", f"So: {one}", one + "!", one + one, write(ONE, OTHER), one[:-1], write(), write(BAD)):
        assert not fits(form, text, marks), text
    assert not fits(form, write(("other", "{}")), marks)
    assert fits(form, as_kimi(ONE, first=17), marks) is (way == "kimi")


@pytest.mark.parametrize(("way", "marks"), CASES)
def test_any_text_with_calls_that_are_right(way: ToolFormat, marks: tuple[str, ...]) -> None:
    several, alone = (strict_calls(tools(strict=True), way, ids_of(marks), several=more) for more in (True, False))
    write = WAYS[way]
    for text in ("", "So.\n", write(ONE), f"So: {write(LOOSE)}", f"{write(ONE)}\nAnd {write(OTHER)} Done."):
        assert fits(several, text, marks), text
    assert fits(several, f"So: {write(ONE, LOOSE, OTHER)}", marks)
    assert not fits(alone, f"So: {write(ONE, OTHER)}", marks)
    for text in (write(BAD), f"So: {write(ONE, BAD)}", f"{write(ONE)}{write(BAD)}", write(ONE)[:-1]):
        assert not fits(several, text, marks), text


@pytest.mark.parametrize(("way", "marks"), CASES)
def test_a_call_or_an_answer_of_its_form(way: ToolFormat, marks: tuple[str, ...]) -> None:
    answer, write = Structured(regex="yes|no"), WAYS[way]
    several, alone = (call_or(answer, tools(strict=True), way, ids_of(marks), several=more) for more in (True, False))
    for form in (several, alone):
        for text in ("yes", write(ONE), write(LOOSE)):
            assert fits(form, text, marks), text
        for text in ("maybe", write(BAD), f"{write(ONE)}yes"):
            assert not fits(form, text, marks), text
    assert fits(several, write(ONE, LOOSE), marks)
    assert not fits(alone, write(ONE, LOOSE), marks)


def test_an_id_that_the_model_writes_twice_names_one_call() -> None:
    reader = ChatReader("none", "kimi", None)
    deltas = [*reader.feed(as_kimi(ONE) + as_kimi(ONE)), *reader.finish()]
    first, second = (call.id for delta in deltas for call in delta.tool_calls or ())
    assert (first, len(second)) == ("functions.get:0", 9)


@pytest.mark.parametrize("end", ["</think>", "</think>\n\n", ""])
def test_a_call_of_kimi_s_ends_the_reasoning(end: str) -> None:
    """However the text is cut. Of other models it is part of what they think."""
    text = f"<think>Hm. <|tool_call </thin {end}{as_kimi(ONE)}"
    for pieces in cuts(text):
        reader = ChatReader("think", "kimi", None)
        deltas = [*(delta for piece in pieces for delta in reader.feed(piece)), *reader.finish()]
        assert "".join(delta.reasoning_content or "" for delta in deltas) == "Hm. <|tool_call </thin ", pieces
        assert [call.id for delta in deltas for call in delta.tool_calls or ()] == ["functions.get:0"], pieces
        assert not any(delta.content for delta in deltas), pieces
    thought = f"Hm. {as_plain(ONE)} "
    deltas = ChatReader("think_opened", "deepseek", None).feed(f"{thought}</think>Yes")
    assert [(delta.reasoning_content, delta.content) for delta in deltas] == [(thought, None), (None, "Yes")]


async def test_kimi_s_ids_go_back_as_the_model_wrote_them(tmp_path: Path) -> None:
    written = as_kimi(("get_time", '{"zone": "Zürich"}'), ("get_time", "{}"), first=3)
    with tokenizer_process(byte_checkpoint(tmp_path, KIMI), max_model_len=4096) as engine, http_process(engine) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            answer, _ = await chat(engine, client, f"So: {written}", tools=[TOOL])
            message = answer.choices[0].message
            assert (message.content, answer.choices[0].finish_reason) == ("So: ", "tool_calls")
            ids = [call.id for call in message.tool_calls]
            assert ids == ["functions.get_time:3", "functions.get_time:4"]
            chunks, _ = await chat(engine, client, written, tools=[TOOL], stream=True)
            assert [call.id for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()] == ids

            results = [{"role": "tool", "tool_call_id": one, "content": "12:00"} for one in ids]
            turns = [{"role": "user", "content": "hi"}, message, *results]
            _, prompt = await chat(engine, client, "Noon.", messages=turns, tools=[TOOL])
            shown = "".join(f"<|im_tool|>tool<|im_middle|>## Return of {one}\n12:00<|im_end|>" for one in ids)
            assert f"So: {written}<|im_end|>{shown}" in prompt


async def test_reasoning_that_deepseek_s_template_opens_but_not_behind_results(tmp_path: Path) -> None:
    call: Any = {"id": "abc123xyz", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turn = {"role": "user", "content": "hi"}
    result = [
        turn,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "7"},
    ]
    with (
        tokenizer_process(byte_checkpoint(tmp_path, FENCED), max_model_len=4096) as engine,
        http_process(engine) as url,
    ):
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            for turns, says, wanted in [
                ([turn], "Hm.</think>Yes", ("Hm.", "Yes")),
                (result, "Yes", (None, "Yes")),
                (result, "<think>Hm.</think>Yes", ("Hm.", "Yes")),
            ]:
                for more in ({}, {"tools": [TOOL]}):
                    answer, prompt = await chat(engine, client, says, messages=turns, **more)
                    message = answer.choices[0].message
                    assert (getattr(message, "reasoning_content", None), message.content) == wanted
                    assert prompt.endswith("<think>\n") is (turns == [turn])
