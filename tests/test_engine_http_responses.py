"""POST /v1/responses, through OpenAI's client: items in, items out, whole and streamed.

The tokenizer and HTTP processes are real; the test plays the model, and so knows what it says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tercet.ipc.step_messages import Abort, Ended
from test_engine_http_tools import HERMES
from tokenizer_process import EOS, USAGE, TokenizerProcess, byte_checkpoint, byte_tokenizer, tokenizer_process

PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}
DEEP = '{"a":' * 130 + "1" + "}" * 130
TOOL: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": PARAMETERS, "strict": False}
CALL = '<tool_call>{"name": "get_time", "arguments": {"zone": "Zürich"}}</tool_call>'
SHOWN = (
    f'<tools>{{"type": "function", "function": {{"name": "get_time", "parameters": {json.dumps(PARAMETERS)}}}}}</tools>'
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    folder = byte_checkpoint(tmp_path_factory.mktemp("responses"), HERMES)
    with tokenizer_process(folder, max_model_len=4096) as process:
        yield process


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def respond(
    engine: TokenizerProcess, client: AsyncOpenAI, says: str, *, reason: Any = "stop", **request: Any
) -> tuple[Any, str]:
    """What the client makes of a model that says so, and the prompt that the model got."""
    asking = asyncio.ensure_future(client.responses.create(**{"model": "tiny", "input": "hi", **request}))
    prompt = await played(engine, says, reason, logged="message.output_text.logprobs" in request.get("include", ()))
    answer = await asking
    return ([event async for event in answer] if request.get("stream") else answer), prompt


async def played(engine: TokenizerProcess, says: str, reason: Any = "stop", *, logged: bool = False) -> str:
    submit = await asyncio.to_thread(engine.next_submit)
    text, stop_id = (says + "</s>", EOS) if reason == "stop" else (says, None)
    ended = Ended(submit.number, reason, stop_id, USAGE)
    await asyncio.to_thread(engine.sample, submit.number, text, ended, logged=logged)
    return byte_tokenizer().decode(memoryview(submit.prompt_ids).cast("i").tolist(), skip_special_tokens=False)


async def test_a_text(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    answer, prompt = await respond(
        engine, client, "Grüße", instructions="Be brief.", temperature=0.5, max_output_tokens=50, metadata={"a": "b"}
    )
    assert prompt == "<system>Be brief.<user>hi<assistant>"
    assert (answer.status, answer.output_text, answer.model, answer.object) == (
        "completed",
        "Grüße",
        "tiny",
        "response",
    )
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.temperature, answer.max_output_tokens, answer.metadata) == (0.5, 50, {"a": "b"})
    assert (answer.instructions, answer.error, answer.incomplete_details) == ("Be brief.", None, None)
    assert answer.completed_at >= answer.created_at


async def test_events_tell_the_whole_answer(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    says = f"<think>\nHm.</think>\nLet me see.{CALL}{CALL} And?"
    events, _ = await respond(engine, client, says, tools=[TOOL], stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[1].response.status == "in_progress"
    assert events[1].response.output == []
    end = events[-1]
    assert (end.type, end.response.status) == ("response.completed", "completed")
    kinds = [item.type for item in end.response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    for place, item in enumerate(end.response.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == place]
        assert of_item[0].type == "response.output_item.added"
        assert of_item[0].item.status == "in_progress"
        assert of_item[-1].type == "response.output_item.done"
        assert of_item[-1].item == item
        assert {event.item_id for event in of_item[1:-1]} == {item.id} == {of_item[0].item.id}
        told = "".join(event.delta for event in of_item if event.type.endswith(".delta"))
        (done,) = (event for event in of_item if event.type.endswith(("text.done", "arguments.done")))
        if item.type == "function_call":
            assert told == done.arguments == item.arguments
            assert (item.name, json.loads(told)) == ("get_time", {"zone": "Zürich"})
        else:
            assert told == done.text == item.content[0].text
            assert [event.type for event in of_item][1::len(of_item) - 3] == [
                "response.content_part.added", "response.content_part.done"
            ]  # fmt: skip
    assert len({item.id for item in end.response.output}) == 5
    assert end.response.output[0].content[0].text == "Hm."
    assert end.response.output_text == "Let me see. And?"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_what_messages_say(
    engine: TokenizerProcess, client: AsyncOpenAI, stream: bool
) -> None:
    """And of nothing else: not of reasoning, of calls, of marks."""
    says = f"<think>\nHm: grüß.</think>\nGrüße.{CALL}{CALL} And: grüß?"
    answer, _ = await respond(
        engine, client, says, tools=[TOOL], include=["message.output_text.logprobs"], stream=stream
    )
    if stream:
        deltas = [event for event in answer if event.type == "response.output_text.delta"]
        assert b"".join(bytes(one.bytes) for event in deltas for one in event.logprobs) == "Grüße. And: grüß?".encode()
        begun = [event.part for event in answer if event.type == "response.content_part.added"]
        assert [(part.text, getattr(part, "logprobs", [])) for part in begun] == [("", [])] * 3
        answer = answer[-1].response
    messages = [item.content[0] for item in answer.output if item.type == "message"]
    assert [message.text for message in messages] == ["Grüße.", " And: grüß?"]
    for message in messages:
        assert [bytes([byte]) for byte in message.text.encode()] == [bytes(one.bytes) for one in message.logprobs]
        assert {one.logprob for one in message.logprobs} == {-0.5}


async def test_the_official_accumulator_reads_the_stream(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    async def accumulate() -> Any:
        async with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_response()

    accumulating = asyncio.ensure_future(accumulate())
    await played(engine, f"So: {CALL}")
    kinds, answer = await accumulating
    assert answer.output_text == "So: "
    assert json.loads(answer.output[1].arguments) == {"zone": "Zürich"}
    assert kinds[-1] == "response.completed"


async def test_what_an_answer_said_goes_back(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    first, prompt = await respond(engine, client, f"<think>Hm.</think>Let me see.{CALL}{CALL}", tools=[TOOL])
    assert prompt == f"{SHOWN}<user>hi<assistant>"
    calls = [item for item in first.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == 2
    turns = [
        {"role": "developer", "content": "Be exact."},
        {"role": "user", "content": [{"type": "input_text", "text": "What "}, {"type": "input_text", "text": "time?"}]},
        *first.output,
        *({"type": "function_call_output", "call_id": call.call_id, "output": "12:00"} for call in calls),
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Thanks", "type": "message"},
    ]
    answer, prompt = await respond(engine, client, "Bye.", input=turns, instructions="Be brief.", tools=[TOOL])
    outputs = "".join(f"<tool>12:00({call.call_id})" for call in calls)
    assert prompt == (
        f"{SHOWN}<system>Be brief.\n\nBe exact.<user>What time?<assistant>Let me see.<think>Hm.</think>{CALL * 2}"
        f"{outputs}<assistant>Noon.<user>Thanks<assistant>"
    )
    assert answer.output_text == "Bye."


async def test_an_answer_of_calls_alone_and_one_of_nothing(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    answer, _ = await respond(engine, client, CALL * 2, tools=[TOOL], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.parallel_tool_calls is False
    answer, _ = await respond(engine, client, "")
    assert [(item.type, item.content[0].text) for item in answer.output] == [("message", "")]
    events, _ = await respond(engine, client, "", stream=True)
    assert events[-1].response.output_text == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut(engine: TokenizerProcess, client: AsyncOpenAI, stream: bool) -> None:
    answer, _ = await respond(engine, client, "On and", reason="length", max_output_tokens=6, stream=stream)
    if stream:
        assert answer[-1].type == "response.incomplete"
        answer = answer[-1].response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.output_text) == ("incomplete", "On and")


async def test_reasoning_is_asked_for_and_counted(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    answer, prompt = await respond(
        engine, client, "<think>12345</think>ok", reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    assert prompt == "<user>hi<assistant>low"
    # With this tokenizer the marks are spelled, and each letter is a token.
    assert answer.usage.output_tokens_details.reasoning_tokens == 5
    assert answer.reasoning.effort == "low"


async def test_a_form(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    class Number(BaseModel):
        n: int

    asking = asyncio.ensure_future(client.responses.parse(model="tiny", input="hi", text_format=Number))
    submit = await asyncio.to_thread(engine.next_submit)
    assert submit.sampling.grammar is not None
    engine.sample(submit.number, '{"n": 3}</s>', Ended(submit.number, "stop", EOS, USAGE))
    assert (await asking).output_parsed == Number(n=3)


async def test_a_failure_on_the_way_is_the_last_event(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    stream = asyncio.ensure_future(
        client.responses.create(model="tiny", input="hi", stream=True, extra_body={"timeout": 0.5})
    )
    submit = await asyncio.to_thread(engine.next_submit)
    engine.sample(submit.number, "So")
    events = [event async for event in await stream]
    assert isinstance(await asyncio.to_thread(engine.next_message), Abort)
    end = events[-1]
    assert isinstance(end, openai.types.responses.ResponseFailedEvent)
    assert end.response.status == "failed"
    assert end.response.error is not None
    assert "0.5 s" in end.response.error.message
    assert end.sequence_number == len(events) - 1


async def test_who_leaves_is_cancelled(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    asking = asyncio.ensure_future(client.responses.create(model="tiny", input="hi", stream=True))
    submit = await asyncio.to_thread(engine.next_submit)
    engine.sample(submit.number, "So")
    stream = await asking
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    assert isinstance(await asyncio.to_thread(engine.next_message), Abort)


MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": []}),
        ("input", {"input": ""}),
        ("input", {"input": 3}),
        ("input[0].type", {"input": [{"type": "web_search_call"}]}),
        ("input[0].type", {"input": [{"type": ["message"]}]}),
        ("input[1].role", {"input": [MESSAGE, {"role": "robot", "content": "hi"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "12:00"}]}),  # of which call?
        ("input[0].content", {"input": [{"role": "user"}]}),
        (
            "input[0].content[0].image_url",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        ),
        (
            "input[1].arguments",
            {"input": [MESSAGE, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
        ),
        (
            "input",  # of a call that is nested too deep
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": DEEP}]},
        ),
        ("input[0].encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("store", {"store": True}),
        ("background", {"background": True}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [{**TOOL, "strict": True, "parameters": {"not": {}}}], "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]}),
        ("text.format", {"text": {"format": {"type": "json_schema"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "schema": {"not": {"const": 3}}}}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("text.format", {"text": {"format": {"type": "text"}}, "structured_outputs": {"regex": "a"}}),
        ("reasoning", {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}}),
        ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
        ("include[0]", {"include": ["file_search_call.results"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}),
        ("truncation", {"truncation": "auto"}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_tokens", {"max_tokens": 5}),
        ("temperature", {"temperature": -1}),
        ("n", {"n": 2}),
        ("surprise", {"surprise": 1}),
        ("input", {"input": "x" * 5000}),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(url: str, param: str, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True):
            answer = await client.post("/v1/responses", json={"input": "hi", "stream": stream, **body})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param, answer.text
