"""What Gemma 4 says: calls in its own notation, thoughts in a channel, however the text is cut."""

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from grammar_fits import fits, ids_of
from tercet.engine.after_thought import after_thought
from tercet.engine.chat_reader import ChatReader
from tercet.engine.chat_template import ChatTemplate
from tercet.engine.http_errors import ApiError
from tercet.engine.http_tools import with_tools
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.engine.reasoning import CHANNEL
from tercet.ipc.messages import Structured

TEMPLATE = "{% if tools %}<|tool_call>call:{% endif %}{{ messages[0].content }}<|channel>thought\n<channel|>"
ARGUMENTS = [
    {},
    {"city": "Zürich, {a:1} [b] \"c\" \\ 'd'\n", "n": -3, "x": 0.5, "yes": True, "no": False, "none": None},
    {"one": {"two": [{"three": ["a:b,", []]}, [1, 2e-7], {}], "a-b.c": ""}},
]


def written(value: Any) -> str:
    """As the template of the published checkpoints writes an argument."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case bool():
            return "true" if value else "false"
        case dict():
            return "{" + ",".join(f"{key}:{written(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(written(one) for one in value) + "]"
        case _:
            return str(value)


def read(text: str, seed: int) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a text in pieces."""
    chance, reader, deltas, at = random.Random(seed), ChatReader("channel", "gemma", None), [], 0
    while at < len(text):
        end = at + chance.randint(1, 9)
        deltas += reader.feed(text[at:end])
        at = end
    deltas += reader.finish()
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    return (
        "".join(delta.reasoning_content or "" for delta in deltas),
        "".join(delta.content or "" for delta in deltas),
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


@pytest.mark.parametrize("seed", range(5))
def test_thoughts_and_calls(seed: int) -> None:
    calls = "".join(f"<|tool_call>call:f_{n}{written(one)}<tool_call|>" for n, one in enumerate(ARGUMENTS))
    expected = [(f"f_{n}", one) for n, one in enumerate(ARGUMENTS)]
    assert read(f"<|channel>thought\nHm, <chan<channel|>Well.{calls}", seed) == ("Hm, <chan", "Well.", expected)
    assert read(f"<|channel>thought\n<channel|>{calls}", seed) == ("", "", expected)


@pytest.mark.parametrize(
    "body", ["call:f{a:b}", "call:f{a:1", "f{a:1}", "call:{a:1}", "call:f[1]", 'call:f{a:<|"|>b}', "call:f{a:NaN}"]
)
def test_what_is_no_call_is_content(body: str) -> None:
    for text in (f"<|tool_call>{body}<tool_call|>", f"<|tool_call>{body}"):
        assert read(text, 1) == ("", text, [])


def test_other_notations_that_models_slip_into() -> None:
    body = '<|tool_call>call:f{ "a:b" : "c:d", <|"|>e<|"|>: None }<tool_call|>'
    assert read(body, 2)[2] == [("f", {"a:b": "c:d", "e": None})]


def test_the_template_says_both() -> None:
    template = ChatTemplate(TEMPLATE, {})
    assert (template.tool_format, template.reasoning_format) == ("gemma", "channel")


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("marks", [CHANNEL[:2], ()])
def test_a_form_behind_a_thought(marks: tuple[str, ...], opened: bool) -> None:
    form, opening = Structured(choice=("x", "y")), "" if opened else "<|channel>thought"
    later = after_thought(form, ids_of(marks), opened=opened, tags=CHANNEL)
    assert fits(later, f"{opening}\nHm.\n<channel|>x", marks, special=True)
    assert fits(later, "x", marks) != opened
    assert not fits(later, f"{opening}\nHm.</think>x", marks, special=True)


@pytest.mark.parametrize(
    ("more", "strict"),
    [({"tool_choice": "required"}, False), ({"response_format": {"type": "json_object"}}, False), ({}, True)],
)
def test_what_nothing_can_hold_calls_to_is_refused(more: dict[str, Any], strict: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": strict}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, **more}
    request = msgspec.convert(body, ChatCompletionRequest)
    door: Any = SimpleNamespace(info=SimpleNamespace(tool_format="gemma"))
    with pytest.raises(ApiError, match="want tool_choice auto, strict false"):
        asyncio.run(with_tools(request.to_params(), request, door))


def test_calls_that_may_come_leave_their_marks_in_the_text() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    request = msgspec.convert(body, ChatCompletionRequest)
    door: Any = SimpleNamespace(info=SimpleNamespace(tool_format="gemma"))
    params = asyncio.run(with_tools(request.to_params(), request, door))
    assert not params.skip_special_tokens
    assert params.structured is None
