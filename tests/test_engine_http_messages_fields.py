"""Each field of Anthropic's Messages is honoured: what the model's template and the scheduler get of it.

What is refused is in test_engine_http_messages_refusals.py.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from anthropic.types.beta import BetaContextManagementConfigParam
from pydantic import BaseModel

from played_messages import CALLED, RESULT, TEMPLATE, TOOL, TURN, asked, make_client, next_submit, play, say
from tercet.engine.anthropic_requests import MessagesRequest
from tokenizer_process import TokenizerProcess, byte_checkpoint, tokenizer_process

NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORM = {"format": {"type": "json_schema", "schema": NUMBER}}


class Number(BaseModel):
    """What the client makes a schema of."""

    n: int


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    with tokenizer_process(byte_checkpoint(tmp_path_factory.mktemp("m"), TEMPLATE), max_model_len=2048) as one:
        yield one


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with make_client(url) as client:
        yield client


SAMPLED: dict[str, tuple[Any, Any]] = {
    "max_tokens": (7, 7),
    "temperature": (0.25, 0.25),
    "top_p": (0.5, 0.5),
    "top_k": (3, 3),
    "seed": (8, 8),
    "min_p": (0.5, 0.5),
    "min_tokens": (2, 2),
}
"""Fields and what the scheduler gets of them, under the same names."""
ADJUSTED = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SHOWN: dict[str, tuple[Any, str]] = {
    "messages": ([{"role": "user", "content": "ho"}], "<user>ho<assistant>"),
    "system": ("Be kind.", "<system>Be kind.<user>hi<assistant>"),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, "<user>hi<assistant>!"),
    "output_config": ({"effort": "max"}, "<user>hi<assistant>max"),
}
"""Fields and the prompt that comes of them."""
SILENT: dict[str, Any] = {
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "speed": "standard",
    "service_tier": "standard_only",
    "container": None,
    "diagnostics": None,
    "inference_geo": None,
}
"""Fields that take only what changes nothing."""
ELSEWHERE = {
    *("model", "stream", "stop_sequences", "tools", "tool_choice", "metadata", "stop_token_ids", "ignore_eos"),
    *("logit_bias", "cache_salt", "priority", "queue_timeout", "timeout"),
}
"""Fields with tests of their own, here or in test_engine_http_messages.py."""


def test_no_field_is_missed() -> None:
    known = [*SAMPLED, *ADJUSTED, *SHOWN, *SILENT, *ELSEWHERE]
    assert sorted(known) == sorted(MessagesRequest.__struct_fields__)


async def test_what_the_scheduler_gets(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    plain = (await say(engine, client, "x", extra_body={"seed": 1})).submit.sampling
    changed = {name: value for name, (value, _) in SAMPLED.items()}
    sampling = (await say(engine, client, "x", extra_body=changed)).submit.sampling
    for name, (_, wanted) in SAMPLED.items():
        assert getattr(plain, name) != wanted
        assert getattr(sampling, name) == wanted, name
    for name in ADJUSTED:
        assert (await say(engine, client, "x", extra_body={name: 1.5})).submit.sampling.adjustments != plain.adjustments
    biased = (await say(engine, client, "x", extra_body={"logit_bias": {"5": 1.0}})).submit.sampling.adjustments
    assert biased != plain.adjustments
    stops = (await say(engine, client, "x", extra_body={"stop_token_ids": [5], "ignore_eos": True})).submit.sampling
    assert memoryview(stops.stop_ids).cast("i").tolist() == [5]
    handled = {"cache_salt": "s", "priority": 3, "queue_timeout": 9.0}
    submit = (await say(engine, client, "x", extra_body=handled)).submit
    assert (submit.cache_salt, submit.priority, submit.queue_timeout) == ("s", 3, 9.0)


@pytest.mark.parametrize("name", SHOWN)
async def test_what_the_template_gets(engine: TokenizerProcess, client: AsyncAnthropic, name: str) -> None:
    value, prompt = SHOWN[name]
    assert (await say(engine, client, "x", extra_body={name: value})).prompt == prompt


async def test_what_changes_nothing(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    plain = await say(engine, client, "x", extra_body={"seed": 1})
    silent = await say(engine, client, "x", extra_body={"seed": 1, **SILENT})
    assert (silent.prompt, silent.submit.sampling) == (plain.prompt, plain.submit.sampling)


async def test_as_an_agent_asks(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    """With marks of what to cache everywhere, with ids, and through the client for betas."""
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"},
        {"type": "text", "text": "You are an agent.", **mark},
        {"type": "text", "text": "Be kind.", **mark},
    ]
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "<note>"}, {"type": "text", "text": "hi", **mark}]},
        {**CALLED, "content": [{**CALLED["content"][0], **mark}]},  # type: ignore[dict-item]
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "12:00", **mark}]},
    ]
    tool: Any = {**TOOL, **mark, "type": "custom", "eager_input_streaming": True}
    request = {"messages": turns, "system": system, "tools": [tool], "metadata": {"user_id": "u" * 512}}
    _, prompt, _ = await say(engine, client, "x", **request)
    assert prompt.endswith(
        "</tools><system>You are an agent.\nBe kind.<user><note>\nhi<assistant>"
        f"{CALL_SHOWN}<tool>12:00(abcdefghi)<assistant>"
    )
    keeps: BetaContextManagementConfigParam = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    counted = await client.beta.messages.count_tokens(
        model="tiny", messages=turns, system=system, tools=[tool], context_management=keeps, betas=["x"]
    )
    assert counted.input_tokens == len(prompt.encode())


async def test_no_model_is_the_one_there_is(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    assert (await say(engine, client, "x", extra_body={"model": None})).answer.model == "tiny"


CALL_SHOWN = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        ([*TURN, *TURN], "<user>hi\nhi"),
        (
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, *TURN],
            "<assistant>a\nb<user>hi",
        ),
        ([{"role": "assistant", "content": []}, *TURN], "<assistant><user>hi"),
        ([{"role": "user", "content": []}], "<user>"),
        ([*TURN, {"role": "system", "content": "Short."}], "<user>hi<system>Short."),
        ([CALLED, {"role": "user", "content": [RESULT]}], f"<assistant>{CALL_SHOWN}<tool>(abcdefghi)"),
        ([CALLED, {"role": "user", "content": [RESULT]}, *TURN], f"<assistant>{CALL_SHOWN}<tool>(abcdefghi)<user>hi"),
    ],
)
async def test_turns(
    engine: TokenizerProcess, client: AsyncAnthropic, turns: list[dict[str, Any]], prompt: str
) -> None:
    """Those of one role in a row are one."""
    assert (await say(engine, client, "x", messages=turns)).prompt == f"{prompt}<assistant>"


async def test_texts_between_calls_are_one_text(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    blocks = [{"type": "text", "text": "a "}, *CALLED["content"], {"type": "text", "text": "b"}]
    turns = [*TURN, {"role": "assistant", "content": blocks}, *TURN]
    assert "<assistant>a b<tool_call>" in (await say(engine, client, "x", messages=turns)).prompt


async def test_a_system_s_first_line_for_others(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    text = "x-anthropic-billing-header: cch=1;\nBe kind."
    assert (await say(engine, client, "x", system=text)).prompt == "<system>Be kind.<user>hi<assistant>"
    later = f"Be kind.\n{text}"
    assert (await say(engine, client, "x", system=later)).prompt == f"<system>{later}<user>hi<assistant>"


async def test_choices_of_tools(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    other = {**TOOL, "name": "set_time"}

    async def told(choice: dict[str, Any], says: str) -> tuple[int, str | None]:
        """How many calls come of it, and the form that the answer is held to."""
        message, _, submit = await say(engine, client, says, tools=[TOOL, other], tool_choice=choice)
        return sum(block.type == "tool_use" for block in message.content), submit.sampling.grammar

    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    assert await told({"type": "auto"}, call * 2) == (2, None)
    assert await told({"type": "auto", "disable_parallel_tool_use": True}, call * 2) == (1, None)
    num_calls, form = await told({"type": "any", "disable_parallel_tool_use": True}, call * 2)
    assert num_calls == 1
    assert form is not None
    assert "get_time" in form
    assert "set_time" in form
    _, form = await told({"type": "tool", "name": "get_time"}, call)
    assert form is not None
    assert "get_time" in form
    assert "set_time" not in form
    message, prompt, _ = await say(engine, client, call, tools=[TOOL], tool_choice={"type": "none"})
    assert (prompt, message.content[0].text) == ("<user>hi<assistant>", call)
    no_calls = {"type": "none", "disable_parallel_tool_use": True}
    assert (await say(engine, client, call, tool_choice=no_calls)).answer.content[0].text == call
    strict = (await say(engine, client, call, tools=[{**TOOL, "input_schema": NUMBER, "strict": True}])).submit
    assert strict.sampling.grammar is not None


async def test_the_form_of_an_answer(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    """Here it is asked for; test_engine_http_structured.py sees that it is held to."""

    form = (await say(engine, client, '{"n": 1}', output_config=FORM)).submit.sampling.grammar
    assert form is not None
    assert '"enum"' in form.replace("\\", "")
    asking = asyncio.ensure_future(client.messages.parse(**asked(), output_format=Number))
    submit = await next_submit(engine)
    assert submit.sampling.grammar is not None
    await asyncio.to_thread(play, engine, submit, '{"n": 1}')
    parsed = (await asking).parsed_output
    assert parsed is not None
    assert parsed.n == 1
