"""Calls as Mistral's models write them, through a real engine: that must come, that must be right, and the turns after.

The weights are random: the mask alone makes them calls.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from tokenizers import AddedToken

from at_once import at_once
from checkpoints import make_checkpoint, tokenizer
from daemon import Daemon, free_port
from families import VOCAB_SIZE
from mistral_style import LISTED, NAMED, TOKENS

SCHEMAS: dict[str, Any] = {
    name: {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    for name, properties in {
        "grow": {"kind": {"enum": ["leaf", "[TOOL_CALLS]"]}, "on": {"type": "boolean"}},
        "grow_more": {"n": {"enum": [1, 2]}},
    }.items()
}
END = "<|im_end|>"
TURNS: Any = [{"role": "user", "content": "the cat"}]
NAMED_TOOL = {"type": "function", "function": {"name": "grow_more"}}


class Served(NamedTuple):
    """An engine."""

    is_listed: bool
    """Its model writes calls in a list."""
    url: str
    client: OpenAI
    ask: dict[str, Any]
    """A chat, with tools."""
    opening: int
    """The id of `[TOOL_CALLS]`."""

    def bias(self, by: int) -> dict[str, int]:
        return {str(self.opening): by}


def tools(*, strict: bool = False) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


@pytest.fixture(scope="module", params=["listed", pytest.param("named", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_checkpoint("mistral", folder, max_position_embeddings=4096)
    is_listed = request.param == "listed"
    marks = TOKENS[:3] if is_listed else TOKENS
    words = copy.deepcopy(tokenizer(VOCAB_SIZE - len(marks)))
    words.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    words.chat_template = LISTED if is_listed else NAMED
    words.save_pretrained(folder)
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", "--no-log-requests"]
    # The template still says which of both ways it is.
    flags += ["--tool-call-parser", "mistral", "--http", f"127.0.0.1:{free_port()}"]
    with (
        Daemon(str(folder), *flags) as daemon,
        OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        opening = words.convert_tokens_to_ids("[TOOL_CALLS]")
        assert daemon.http is not None
        assert isinstance(opening, int)
        yield Served(is_listed, daemon.http, client, {"model": "tiny", "messages": TURNS, "tools": tools()}, opening)


def check(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["required", NAMED_TOOL])
def test_a_call_comes(served: Served, choice: Any) -> None:
    def answered(seed: int) -> Any:
        ask = {**served.ask, "tool_choice": choice, "seed": seed}
        return served.client.chat.completions.create(**ask, extra_body={"return_token_ids": True}).choices[0]

    def streamed(seed: int) -> list[Any]:
        ask = {**served.ask, "tool_choice": choice, "seed": seed}
        return [chunk.choices[0] for chunk in served.client.chat.completions.create(stream=True, **ask)]

    for answer, chunks in zip(at_once(answered, range(4)), at_once(streamed, range(4)), strict=True):
        assert answer.message.tool_calls is not None, answer.message.content
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert answer.model_extra is not None
        assert answer.model_extra["token_ids"][0] == served.opening  # the token, not its spelling
        check(call)
        assert choice == "required" or call.function.name == "grow_more"

        (piecewise,) = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert (piecewise.name, piecewise.arguments) == (call.function.name, call.function.arguments)
        assert not any(chunk.delta.content for chunk in chunks)
        assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.long  # as those of Hermes in test_engine_http_tool_choice.py
def test_strict_tools_are_called_right_or_not_at_all(served: Served) -> None:
    ask: dict[str, Any] = {**served.ask, "tools": tools(strict=True), "max_tokens": 400}
    message = (
        served.client.chat.completions.create(parallel_tool_calls=False, logit_bias=served.bias(100), **ask)
        .choices[0]
        .message
    )
    assert message.tool_calls is not None, message.content
    (call,) = message.tool_calls
    check(call)

    def answered(seed: int) -> Any:
        return served.client.chat.completions.create(logit_bias=served.bias(5), seed=seed, **ask).choices[0].message

    counts = []
    for message in at_once(answered, range(8)):
        for call in message.tool_calls or ():
            check(call)
        counts.append(len(message.tool_calls or ()))
    assert max(counts) > 1, counts
    ask["max_tokens"] = 40
    message = served.client.chat.completions.create(logit_bias=served.bias(-100), seed=1, **ask).choices[0].message
    assert (message.tool_calls, bool(message.content)) == (None, True)


def test_a_call_or_an_answer_of_its_form(served: Served) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["grow"]}}
    ask: dict[str, Any] = {**served.ask, "tools": tools(strict=True), "response_format": form}
    ask["parallel_tool_calls"] = False
    message = served.client.chat.completions.create(logit_bias=served.bias(100), **ask).choices[0].message
    assert message.tool_calls is not None, message.content
    check(message.tool_calls[0])
    message = served.client.chat.completions.create(logit_bias=served.bias(-100), **ask).choices[0].message
    assert message.tool_calls is None
    jsonschema.validate(json.loads(message.content or ""), SCHEMAS["grow"])


def test_the_turns_after_a_call(served: Served) -> None:
    """The template refuses ids that are not as Mistral's, and turns out of order."""
    call = served.client.chat.completions.create(tool_choice="required", seed=3, **served.ask).choices[0].message
    assert call.tool_calls is not None
    (called,) = call.tool_calls
    result = {"role": "tool", "tool_call_id": called.id, "content": "7"}
    ask: dict[str, Any] = {**served.ask, "messages": [*TURNS, call, result], "max_tokens": 8}
    said = served.client.chat.completions.create(tool_choice="none", seed=1, **ask).choices[0].message
    assert said.content
    ask["messages"] += [{"role": "assistant", "content": "Seven."}, {"role": "user", "content": "and the dog"}]
    again = served.client.chat.completions.create(tool_choice="required", **{**ask, "max_tokens": None}).choices[0]
    assert again.message.tool_calls is not None
    check(again.message.tool_calls[0])

    turns = [turn if isinstance(turn, dict) else turn.model_dump(exclude_none=True) for turn in ask["messages"]]
    tokens = httpx.post(f"{served.url}/tokenize", json={"messages": turns}, timeout=60).json()["tokens"]
    prompt = httpx.post(f"{served.url}/detokenize", json={"tokens": tokens}, timeout=60).json()["prompt"]
    name, arguments = called.function.name, json.dumps(json.loads(called.function.arguments))
    shown = f"[TOOL_CALLS]{name}[CALL_ID]{called.id}[ARGS]{arguments}"
    if served.is_listed:
        shown = f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}, "id": "{called.id}"}}]'
    result_shown = f"[TOOL_RESULTS]7, {called.id}[/TOOL_RESULTS]"
    assert prompt.endswith(f"[INST]the cat[/INST]{shown}{END}{result_shown}Seven.{END}[INST]and the dog[/INST]")

    with pytest.raises(openai.BadRequestError, match="want ids of nine letters and digits, not call_1") as refused:
        served.client.chat.completions.create(
            **{**ask, "messages": [*TURNS, call, {**result, "tool_call_id": "call_1"}]}
        )
    assert refused.value.param == "messages"
