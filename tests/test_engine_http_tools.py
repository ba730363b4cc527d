"""Tools and reasoning through the HTTP door: into the chat template, and back out of what a model has written.

The tokenizer and HTTP processes are real; the test plays the model, and so knows what it says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from http_process import http_process
from tercet.ipc.step_messages import Ended
from tokenizer_process import EOS, USAGE, TokenizerProcess, byte_checkpoint, byte_tokenizer, tokenizer_process

HERMES = """{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif -%}
{% for m in messages %}<{{ m.role }}>{% if m.content is not none %}{{ m.content }}{% endif %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}<assistant>{% if enable_thinking %}!{% endif -%}
{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Zeit für Zone",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "Zürich"}}\n</tool_call>'
TURN = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    folder = byte_checkpoint(tmp_path_factory.mktemp("tools"), HERMES)
    with tokenizer_process(folder, max_model_len=4096) as process:
        yield process


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def chat(engine: TokenizerProcess, client: AsyncOpenAI, says: str, **request: Any) -> tuple[Any, str]:
    """What the client makes of a model that says so, and the prompt that the model got."""
    request = {"model": "tiny", "messages": TURN, **request}
    asking = asyncio.ensure_future(client.chat.completions.create(**request))
    submit = await asyncio.to_thread(engine.next_submit)
    prompt = byte_tokenizer().decode(memoryview(submit.prompt_ids).cast("i").tolist(), skip_special_tokens=False)
    playing = asyncio.to_thread(engine.sample, submit.number, says + "</s>", Ended(submit.number, "stop", EOS, USAGE))
    answer, _ = await asyncio.gather(asking, playing)
    return ([chunk async for chunk in answer] if request.get("stream") else answer), prompt


async def test_tools_reach_the_template_and_calls_come_back(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    says = f"<think>\nThe time.\n</think>\n\nLet me see.{CALL}\n{CALL}"
    answer, prompt = await chat(engine, client, says, tools=[TOOL])
    assert prompt == f"<tools>{json.dumps(TOOL, ensure_ascii=False)}</tools><user>hi<assistant>"
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.reasoning_content == "The time.\n"
    first, second = choice.message.tool_calls
    for call in (first, second):
        assert (call.type, call.function.name) == ("function", "get_time")
        assert json.loads(call.function.arguments) == {"zone": "Zürich"}
    assert first.id != second.id

    # And the next turn, with what the client's own objects say.
    turns = [*TURN, choice.message, {"role": "tool", "tool_call_id": first.id, "content": "12:00"}]
    answer, prompt = await chat(engine, client, "Noon.", messages=turns, tools=[TOOL])
    call_text = '<tool_call>{"name": "get_time", "arguments": {"zone": "Zürich"}}</tool_call>'
    assert prompt.endswith(
        f"<user>hi<assistant>Let me see.<think>The time.\n</think>{call_text * 2}<tool>12:00({first.id})<assistant>"
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Noon.", "stop")
    assert answer.choices[0].message.tool_calls is None


async def test_arguments_between_marks_have_the_types_of_the_schema(
    engine: TokenizerProcess, client: AsyncOpenAI
) -> None:
    """As Qwen3-Coder writes them."""
    properties = {"zone": {"type": "string"}, "days": {"type": "integer"}}
    tool = {
        "type": "function",
        "function": {"name": "plan", "parameters": {"type": "object", "properties": properties}},
    }
    call = "<function=plan>\n<parameter=zone>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n</function>"
    answer, _ = await chat(engine, client, f"<tool_call>\n{call}\n</tool_call>", tools=[tool])
    (found,) = answer.choices[0].message.tool_calls
    assert (found.function.name, json.loads(found.function.arguments)) == ("plan", {"zone": "12", "days": 12})


async def test_streamed(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    says = f"<think>Hm.</think>Let me see.{CALL}\n{CALL}"
    chunks, _ = await chat(engine, client, says, tools=[TOOL], stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "get_time"), (1, "get_time")]
    assert [json.loads(call.function.arguments) for call in calls] == [{"zone": "Zürich"}] * 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    chunks, _ = await chat(engine, client, says, tools=[TOOL], stream=True, parallel_tool_calls=False)
    assert sum(len(chunk.choices[0].delta.tool_calls or []) for chunk in chunks) == 1


async def test_the_official_accumulator_reads_the_stream(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    async def accumulate() -> Any:
        async with client.chat.completions.stream(model="tiny", messages=TURN, tools=[TOOL]) as stream:  # type: ignore[list-item]
            return await stream.get_final_completion()

    asking = asyncio.ensure_future(accumulate())
    submit = await asyncio.to_thread(engine.next_submit)
    engine.sample(submit.number, f"So: {CALL}</s>", Ended(submit.number, "stop", EOS, USAGE))
    (choice,) = (await asking).choices
    assert (choice.message.content, choice.finish_reason) == ("So: ", "tool_calls")
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"zone": "Zürich"}

    # What it adds for its program (`parsed`, `parsed_arguments`) goes back with the turn.
    turns = [*TURN, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "12:00"}]
    _, prompt = await chat(engine, client, "Noon.", messages=turns, tools=[TOOL])
    call_text = '<tool_call>{"name": "get_time", "arguments": {"zone": "Zürich"}}</tool_call>'
    assert prompt.endswith(f"<user>hi<assistant>So: {call_text}<tool>12:00({call.id})<assistant>")


async def test_half_a_character_in_a_call(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    says = CALL.replace("Zürich", r"\ud83d")
    chunks, _ = await chat(engine, client, says, tools=[TOOL], stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.arguments for call in calls] == [r'{"zone": "\ud83d"}']
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    answer, _ = await chat(engine, client, says, tools=[TOOL])
    assert answer.choices[0].message.tool_calls[0].function.arguments == r'{"zone": "\ud83d"}'
    says = CALL.replace("get_time", r"\ud83d")
    answer, _ = await chat(engine, client, says, tools=[TOOL])
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (says, None)


async def test_without_tools_a_call_is_text(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    answer, prompt = await chat(engine, client, CALL, tools=[TOOL], tool_choice="none")
    assert "<tools>" not in prompt
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    answer, _ = await chat(engine, client, CALL)
    assert answer.choices[0].message.content == CALL


async def test_no_tools_to_choose_from(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    asked: list[dict[str, Any]] = [
        {"tool_choice": "none"},
        *({"tools": [], **more} for more in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False})),
    ]
    for request in asked:
        answer, prompt = await chat(engine, client, CALL, **request)
        assert (prompt, answer.choices[0].message.content) == ("<user>hi<assistant>", CALL)


async def test_turns_as_an_evaluation_harness_marks_them(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    wanted = (await chat(engine, client, "x"))[1]
    assert (await chat(engine, client, "x", messages=[{**TURN[0], "type": "text"}]))[1] == wanted
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="tiny", messages=[{**TURN[0], "type": "image"}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "type"),
        ({"type": "text", "image_url": {"url": "data:,"}}, "image_url"),
        ({"type": "image_url", "image_url": {"uri": "data:,"}}, "image_url.uri"),
        ({"type": "text"}, "text"),
    ],
)
async def test_what_is_neither_text_nor_image_is_refused_with_what_is_wanted(
    client: AsyncOpenAI, part: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="sounds and videos are not served") as refused:
        turn: Any = {"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}
        await client.chat.completions.create(model="tiny", messages=[turn])
    assert refused.value.param == f"messages[0].content[1].{param}"
    assert '; want {"type": "text", "text": …}' in str(refused.value.body)


@pytest.mark.parametrize("mark", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None])
async def test_marks_of_what_is_to_be_cached_say_nothing(
    engine: TokenizerProcess, client: AsyncOpenAI, mark: dict[str, str] | None
) -> None:
    """As clients of Anthropic's models set them."""
    wanted, cached = (await chat(engine, client, "x", tools=[TOOL]))[1], {"cache_control": mark}
    part = {"type": "text", "text": TURN[0]["content"], **cached}
    for turn in ({**TURN[0], **cached}, {"role": "user", "content": [part]}):
        assert (await chat(engine, client, "x", messages=[turn], tools=[{**TOOL, **cached}]))[1] == wanted
    with pytest.raises(openai.BadRequestError) as refused:
        turn = {**TURN[0], "cache_control": {"type": "eternal"}}
        await client.chat.completions.create(model="tiny", messages=[turn])  # type: ignore[list-item]
    assert refused.value.param == "messages[0].cache_control.type"


async def test_the_template_gets_what_is_let_through(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    _, prompt = await chat(engine, client, "x", extra_body=body)
    assert prompt.endswith("<assistant>!")
    _, prompt = await chat(engine, client, "x", extra_body=body, reasoning_effort="high")
    assert prompt.endswith("<assistant>!high")
    both: Any = {"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"reasoning_effort": "low"}}}
    _, prompt = await chat(engine, client, "x", **both)
    assert prompt.endswith("<assistant>low")
    with pytest.raises(openai.BadRequestError, match="want one of them"):
        await client.chat.completions.create(model="tiny", messages=TURN, **{**both, "reasoning_effort": "high"})  # type: ignore[list-item]
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(openai.BadRequestError, match="want enable_thinking, thinking, reasoning_effort"):
            await client.chat.completions.create(
                model="tiny",
                messages=TURN,  # type: ignore[arg-type]
                extra_body={"chat_template_kwargs": {name: "x"}},
            )


async def test_a_template_that_opens_the_reasoning_on_request(tmp_path: Path) -> None:
    source = "{{ messages[0].content }}{{ '<think>' if thinking else '</think>' }}"
    with tokenizer_process(byte_checkpoint(tmp_path, source)) as engine, http_process(engine) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            for name in ("thinking", "enable_thinking"):
                body = {"chat_template_kwargs": {name: True}}
                answer, prompt = await chat(engine, client, "Hm.</think>Yes", extra_body=body)
                message = answer.choices[0].message
                assert (prompt, message.reasoning_content, message.content) == ("hi<think>", "Hm.", "Yes")
            answer, prompt = await chat(engine, client, "Yes")
            assert (prompt, answer.choices[0].message.content) == ("hi</think>", "Yes")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_refusals(client: AsyncOpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{"model": "tiny", "messages": TURN, **change})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("<|python_tag|>", '{"name": "get_time", "parameters": {"zone": "Zürich"}}'),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "get_time", "arguments": {"zone": "Zürich"}}]'),
    ],
)
async def test_other_families(tmp_path: Path, template: str, says: str) -> None:
    source = f"{{% if not tools %}}{template}{{% endif %}}{{{{ messages[0].content }}}}"
    with (
        tokenizer_process(byte_checkpoint(tmp_path, source)) as engine,
        http_process(engine) as url,
    ):
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            answer, _ = await chat(engine, client, says, tools=[TOOL])
            if template == "<|python_tag|>":  # nothing tells its calls from other text
                strict: Any = {"type": "function", "function": {"name": "f", "strict": True}}
                with pytest.raises(openai.BadRequestError, match="want strict false, or tool_choice required"):
                    await client.chat.completions.create(model="tiny", messages=TURN, tools=[strict])
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"zone": "Zürich"}
    assert answer.choices[0].message.content is None


async def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    with tokenizer_process(byte_checkpoint(tmp_path)) as engine, http_process(engine) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
                await client.chat.completions.create(model="tiny", messages=TURN, tools=[TOOL])  # type: ignore[list-item]
