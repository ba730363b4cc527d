"""Calls that must come. The weights are random: the mask alone makes them calls."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jsonschema
import msgspec
import openai
import pytest
from openai import OpenAI, omit
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, ConfigDict

from at_once import at_once
from checkpoints import checkpoint, tokenizer
from covering import long
from daemon import Daemon, free_port
from families import VOCAB_SIZE
from grammar_fits import fits
from section_style import as_fenced, as_kimi, as_plain
from tercet.engine.grammar_trial import GrammarTrial
from tercet.engine.http_tools import with_tools
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.engine.section_calls import DEEPSEEK, KIMI
from tercet.ipc.answers import ToolFormat
from tercet.ipc.messages import SamplingParams

ANSWER = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TURNS: Any = [{"role": "user", "content": "the cat"}]
SHOWS = {
    "hermes": "<tool_call>",
    "llama3": "Environment: ipython",
    "minimax": "<minimax:tool_call>",
    "qwen3_coder": "<tool_call><function=",
    "glm": "<tool_call><arg_key>",
    "deepseek": DEEPSEEK.opening,
    "deepseek_fenced": f"{DEEPSEEK.opening}```json",
    "kimi": KIMI.opening,
}
LONG = ("minimax", "llama3", "qwen3_coder", "glm", "deepseek", "deepseek_fenced", "kimi")


class Inner(BaseModel):
    """Its schema is referred to, not written in place."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["leaf", "tree"]


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Inner
    on: bool


def tools() -> list[Any]:
    number = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    schemas = {"grow": Outer.model_json_schema(), "count": number}
    return [{"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in schemas]


@pytest.mark.parametrize("tool_format", ["hermes", *map(long, LONG)])
def test_a_call_comes(tool_format: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama3"), folder)
    shown = f"{{% if not tools %}}{SHOWS[tool_format]}{{% endif %}}{{{{ messages[0].content }}}}"
    (folder / "chat_template.jinja").write_text(shown)
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny", "--no-log-requests"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools()}
    with (
        Daemon(str(folder), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon,
        OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        ask: Any = {"model": "tiny", "messages": TURNS, "tools": tools()}
        named = {"type": "function", "function": {"name": "grow"}}
        choices: list[Any] = ["required", "required", named]

        def answered(seed: int) -> Choice:
            return client.chat.completions.create(tool_choice=choices[seed], seed=seed, **ask).choices[0]

        for choice, answer in zip(choices, at_once(answered, range(3)), strict=True):
            assert answer.message.tool_calls is not None, answer.message.content
            (call,) = answer.message.tool_calls
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
            if choice == named:
                assert call.function.name == "grow"
        with pytest.raises(openai.BadRequestError, match="none of the tools"):
            client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "x"}}, **ask)


def test_a_strict_tool_is_called_right_or_not_at_all(tmp_path: Path) -> None:
    """With `<tool_call>` as likely as can be, where nothing but the grammar knows how a call goes on."""
    words = copy.deepcopy(tokenizer(VOCAB_SIZE - 1))
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    words.add_tokens(["<tool_call>"])
    words.chat_template = f"{{% if not tools %}}{SHOWS['hermes']}{{% endif %}}{{{{ messages[0].content }}}}"
    words.save_pretrained(folder)
    begins_call = {str(len(words) - 1): 100}
    strict, loose = tools()
    strict["function"]["strict"] = True
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny", "--no-log-requests"]
    with (
        Daemon(str(folder), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon,
        OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):

        def answered(wish: dict[str, Any]) -> ChatCompletionMessage:
            return client.chat.completions.create(**wish).choices[0].message

        ask: Any = {"model": "tiny", "messages": TURNS, "max_tokens": 300, "temperature": 0, "logit_bias": begins_call}
        answer = client.chat.completions.create(tools=[strict], parallel_tool_calls=False, **ask).choices[0].message
        assert answer.tool_calls is not None, answer.content
        (call,) = answer.tool_calls
        assert call.type == "function"
        assert call.function.name == "grow"
        Outer.model_validate_json(call.function.arguments)
        plain_and_text = [{**ask, "tools": [loose]}, {**ask, "tools": [strict, loose], "logit_bias": None}]
        plain, text = at_once(answered, plain_and_text)
        assert plain.tool_calls is None
        assert text.tool_calls is None
        assert text.content
        forced: Any = {"model": "tiny", "messages": TURNS, "tools": [loose], "tool_choice": "required"}
        choice = client.chat.completions.create(extra_body={"return_token_ids": True}, **forced).choices[0]
        assert choice.message.tool_calls is not None
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"][0] == len(words) - 1  # the token, not its spelling
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
        both: Any = {**ask, "tools": [strict], "response_format": form}
        never = {**both, "logit_bias": dict.fromkeys(begins_call, -100)}
        one_call = {**both, "parallel_tool_calls": False}
        for message in at_once(answered, [one_call | {"tool_choice": wish} for wish in (omit, "auto", "required")]):
            assert message.tool_calls is not None, message.content
        for message in at_once(answered, [never | {"tool_choice": wish} for wish in (omit, "auto", "none")]):
            assert message.tool_calls is None
            jsonschema.validate(json.loads(message.content or ""), ANSWER)
        strict["function"]["parameters"] = {"properties": {"a": {"not": {"type": "null"}}}}
        for wish in ({}, {"tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match=r"'grow', which is strict, .*\[\"not\"\]") as refused:
                client.chat.completions.create(**wish, **both)
            assert refused.value.param == "tools"


AROUND: dict[ToolFormat, str] = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3": '{"name": "NAME", "parameters": ARGUMENTS}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    "mistral_named": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "deepseek": as_plain(("NAME", "ARGUMENTS")),
    "deepseek_fenced": as_fenced(("NAME", "ARGUMENTS")),
    "kimi": as_kimi(("NAME", "ARGUMENTS")),
}


@pytest.mark.parametrize("tool_format", AROUND)
async def test_of_schemas_that_nothing_can_hold_a_call_to(tool_format: ToolFormat) -> None:
    """Only the tools that have them are called with any object."""
    door: Any = SimpleNamespace(info=SimpleNamespace(tool_format=tool_format), marks={}, trial=GrammarTrial())
    odd = {"name": "odd", "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    held = [tool["function"] for tool in tools()]
    for others, name in [([odd], "odd"), ([odd, *held], "odd"), ([*held, {**odd, "parameters": deep}], "odd")]:
        for wish in ("required", {"type": "function", "function": {"name": name}}):
            body = {"messages": TURNS, "tools": [{"type": "function", "function": one} for one in others]}
            request = msgspec.convert({**body, "tool_choice": wish}, ChatCompletionRequest)
            params = await with_tools(SamplingParams(), request, door)
            assert params.skip_special_tokens is (tool_format == "hermes")  # its marks are no special tokens
            form = params.structured
            assert form is not None
            for called, arguments, fitting in [
                ("odd", {"a": [1, 1]}, True),
                ("odd", [], False),
                ("count", {"n": 1}, wish == "required" and len(others) > 1),
                ("count", {"n": 3}, False),
            ]:
                text = AROUND[tool_format].replace("NAME", called).replace("ARGUMENTS", json.dumps(arguments))
                assert fits(form, text) is fitting, text
