"""What Anthropic's Messages refuse: each refusal names the field, in the shape and the exceptions of its own client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from played_messages import CALLED, RESULT, TEMPLATE, TOOL, TURN, asked
from tercet.engine.anthropic_requests import CountRequest, MessagesRequest
from tokenizer_process import TokenizerProcess, byte_checkpoint, tokenizer_process

LENGTH = 2048


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    with tokenizer_process(byte_checkpoint(tmp_path_factory.mktemp("m"), TEMPLATE), max_model_len=LENGTH) as one:
        yield one
        assert not one.has_message()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20.0) as client:
        yield client


BLOCK = {"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "https://x.example/a.pdf"}}]}
DEEP: dict[str, Any] = json.loads('{"a":' * 200 + "{}" + "}" * 200)
TOO_MANY = [TOOL] * 129


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "`$.messages`"),
        ({"messages": TURN * 10_001}, "messages has 10001; want at most 10000"),
        ({"messages": [BLOCK]}, r"`$.messages[0].content[0].type`; want 'text', 'image', 'thinking', 'tool_use'"),
        ({"messages": [BLOCK]}, ": documents are not served"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": BLOCK["content"]}]}]},
            "`$.messages[0].content[0].content[0].type`; want 'text', 'image': documents",
        ),
        ({"messages": [{"role": "user", "content": [{**RESULT, "x": 1}]}]}, "unknown field `x`"),
        ({"messages": [{"role": "user", "content": CALLED["content"]}]}, "messages[0].content[0] is a tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "[0].type`"),
        ({"messages": [{"role": "boss", "content": ""}]}, "`$.messages[0].role`; want 'assistant', 'system', 'user'"),
        ({"messages": [*TURN, CALLED]}, "messages ends with calls of the assistant; want what they have given"),
        (
            {"messages": [{**CALLED, "content": [{**CALLED["content"][0], "input": DEEP}]}, *TURN]},  # type: ignore[dict-item]
            "messages[0].content[0].input is nested",
        ),
        ({"system": [{"type": "image"}]}, "`$.system[0].type`; want 'text'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "`$.max_tokens`"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`$.tools[0].type`; want 'custom'"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "`$.tools[0].name`"),
        ({"tools": [{**TOOL, "input_schema": DEEP}]}, "tools[0].input_schema is nested"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "`$.tools[0].defer_loading`"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "`$.tools[0].allowed_callers[0]`"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "`$.tools[0].input_examples`"),
        ({"tools": TOO_MANY}, "`$.tools`"),
        ({"tools": [{**TOOL, "strict": True, "input_schema": {"not": {"const": 3}}}]}, "tools has 'get_time'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice came without tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice has type tool and name None"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "some"}},
            "`$.tool_choice.type`; want 'any', 'auto', 'none', 'tool'",
        ),
        ({"thinking": {"type": "between_tools"}}, "`$.thinking.type`"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "`$.thinking.budget_tokens`"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens came with type adaptive"),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display came with type disabled"),
        ({"output_config": {"effort": "none"}}, "`$.output_config.effort`"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format "),
        ({"output_config": {"task_budget": {}}}, "unknown field `task_budget`"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences is 17 strings"),
        ({"stop_sequences": [""]}, "stop_sequences is a string of 0 characters"),
        ({"metadata": {"user_id": "u" * 513}}, "`$.metadata.user_id`"),
        ({"metadata": {"email": "a"}}, "unknown field `email`"),
        ({"service_tier": "priority"}, "`$.service_tier`"),
        ({"speed": "fast"}, "`$.speed`"),
        ({"container": "x"}, "`$.container`"),
        ({"inference_geo": "eu"}, "`$.inference_geo`"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "`$.context_management.edits[0]`"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "`$.context_management.edits[0].type`"),
        ({"mcp_servers": []}, "unknown field `mcp_servers`"),
        ({"n": 2}, "unknown field `n`"),
        ({"temperature": -1}, "temperature is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"cache_salt": "s" * 257}, "cache_salt is 257 characters"),
    ],
)
def test_refusals(client: Anthropic, change: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**asked(stream=stream), extra_body=change)
        assert refused.value.type == "invalid_request_error"
        assert words in str(refused.value.api_message)
        body: Any = refused.value.body
        assert (body["type"], set(body)) == ("error", {"type", "error", "request_id"})
        assert body["request_id"] == refused.value.request_id


def test_counting_refuses_what_is_none_of_its_fields(client: Anthropic) -> None:
    fields = set(MessagesRequest.__struct_fields__) - set(CountRequest.__struct_fields__)
    assert "max_tokens" in fields
    for name in fields:
        with pytest.raises(anthropic.BadRequestError, match=f"unknown field `{name}`"):
            client.messages.count_tokens(model="tiny", messages=TURN, extra_body={name: None})


def test_other_models(client: Anthropic) -> None:
    for ask in ({**asked(), "model": "claude"}, {**asked(stream=True), "model": "claude"}):
        with pytest.raises(anthropic.NotFoundError, match="model is 'claude'; want 'tiny'") as refused:
            client.messages.create(**ask)
        assert (refused.value.type, refused.value.error_code) == ("not_found_error", "model_not_found")


def test_what_is_no_request(client: Anthropic) -> None:
    for content in (b"{", b"[]", b'"\xff"'):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.post("/v1/messages", cast_to=object, content=content)
        assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.APIStatusError) as refused_coding:
        client.messages.create(**asked(), extra_headers={"content-encoding": "gzip"})
    assert (refused_coding.value.status_code, refused_coding.value.type) == (415, "invalid_request_error")
    with pytest.raises(anthropic.ContentTooLargeError) as too_large:
        client.messages.create(**asked(system="x" * (64 * 2**20 + 1)))
    assert too_large.value.type == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_too_long(client: Anthropic, stream: bool) -> None:
    """In Anthropic's words, by which agents know what to do: the numbers first."""
    turns = [{"role": "user", "content": "x" * LENGTH}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**asked(messages=turns, stream=stream))
    assert refused.value.error_code == "context_length_exceeded"
    prompt = LENGTH + len("<user><assistant>")
    assert str(refused.value.api_message).startswith(
        f"prompt is too long: {prompt} tokens > {LENGTH} maximum; the prompt"
    )
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**asked(max_tokens=LENGTH, stream=stream))
    prompt = len("<user>hi<assistant>")
    words = (
        f"input length and `max_tokens` exceed context limit: {prompt} + {LENGTH} > {LENGTH}; max_tokens is {LENGTH}"
    )
    assert str(refused.value.api_message).startswith(words)


def test_other_paths_speak_as_before(url: str, client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.post("/v1/chat/completions", cast_to=object, body={"messages": [BLOCK]})
    assert set(refused.value.body) == {"error"}  # type: ignore[call-overload]
    assert '; want {"type": "text", "text": …}' in str(refused.value)
