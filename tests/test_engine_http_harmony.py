"""A model that writes in the harmony format, through all APIs that read chats.

The tokenizer and HTTP processes are real; the test plays the model, and so knows what it says.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from anthropic import AsyncAnthropic, BadRequestError
from openai import AsyncOpenAI

from harmony_style import harmony_checkpoint, harmony_tokenizer, play
from tokenizer_process import TokenizerProcess, tokenizer_process

TURN: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}
THOUGHT = "<|channel|>analysis<|message|>final, Grüße?<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>final: Grüße.<|return|>"
CALL = '<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{"zone": "Zürich"}<|call|>'
BEGUN = "<|start|>system<|message|>Effort: medium<|end|>"
HI = f"{BEGUN}<|start|>user<|message|>hi<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    folder, size = harmony_checkpoint(tmp_path_factory.mktemp("harmony")), harmony_tokenizer().get_vocab_size()
    with tokenizer_process(folder, max_model_len=4096, vocab_size=size) as process:
        yield process


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def anthropic(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def heard(asking: Any, engine: TokenizerProcess, says: str, *, logged: bool = False) -> tuple[Any, str]:
    """What comes of a question to a model that says so, and the prompt that the model got."""
    asked = asyncio.ensure_future(asking)
    submit = await asyncio.to_thread(engine.next_submit)
    await asyncio.to_thread(play, engine, submit.number, harmony_tokenizer().encode(says).ids, logged=logged)
    answer = await asked
    prompt = harmony_tokenizer().decode(memoryview(submit.prompt_ids).cast("i").tolist(), skip_special_tokens=False)
    return ([one async for one in answer] if hasattr(answer, "__aiter__") else answer), prompt


async def chat(engine: TokenizerProcess, client: AsyncOpenAI, says: str, **request: Any) -> tuple[Any, str]:
    request = {"model": "tiny", "messages": TURN, **request}
    return await heard(client.chat.completions.create(**request), engine, says, logged="logprobs" in request)


def shown(answer: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Reasoning, content, calls and the end, of a whole answer or of a streamed one."""
    if isinstance(answer, list):
        deltas = [chunk.choices[0].delta for chunk in answer]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        reason = answer[-1].choices[0].finish_reason
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        thought, content = getattr(message, "reasoning_content", ""), message.content or ""
        calls = [call.function for call in message.tool_calls or []]
    return thought, content, [(call.name, json.loads(call.arguments)) for call in calls], reason


GET_TIME = ("get_time", {"zone": "Zürich"})
SAYS: list[tuple[str, dict[str, Any], Any]] = [
    (ANSWER, {}, ("final, Grüße?", "final: Grüße.", [], "stop")),
    (THOUGHT + CALL, {"tools": [TOOL]}, ("final, Grüße?", "", [GET_TIME], "tool_calls")),
    (
        f"<|channel|>commentary<|message|>So:<|end|><|start|>assistant{CALL.replace('<|call|>', '<|end|>')}"
        f"<|start|>assistant{CALL}",
        {"tools": [TOOL]},
        ("", "So:", [GET_TIME, GET_TIME], "tool_calls"),
    ),
    (THOUGHT + CALL, {"tools": [TOOL], "tool_choice": "none"}, ("final, Grüße?", '{"zone": "Zürich"}', [], "stop")),
    ("<|channel|>analysis<|message|>final, Grüße?", {}, ("final, Grüße?", "", [], "length")),
    (ANSWER, {"stop": [": Gr"]}, ("final, Grüße?", "final", [], "stop")),
    *(
        (ANSWER, {"extra_body": {name: value}}, ("final, Grüße?", "final: Grüße.", [], "stop"))
        for name in ("skip_special_tokens", "include_stop_str_in_output")
        for value in (True, False)
    ),
]


@pytest.mark.parametrize(("says", "more", "wanted"), SAYS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_chat_shows(
    engine: TokenizerProcess, client: AsyncOpenAI, says: str, more: dict[str, Any], wanted: Any, stream: bool
) -> None:
    answer, _ = await chat(engine, client, says, stream=stream, **more)
    assert shown(answer) == wanted
    if "stop" in more:
        await asyncio.to_thread(engine.next_message)  # the rest is not wanted


async def test_what_an_answer_said_goes_back(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    """With the client's own objects, and several calls of a turn, which the template would leave out."""
    says, more = (
        SAYS[2][0].replace("<|channel|>commentary<|message|>", f"{THOUGHT}<|channel|>commentary<|message|>"),
        [{"role": "user", "content": "bye"}],
    )
    answer, prompt = await chat(engine, client, says, tools=[TOOL])
    assert prompt == HI.replace("<|start|>user", "<|start|>developer<|message|>[|get_time]<|end|><|start|>user")
    message = answer.choices[0].message
    first, second = message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.id} for call in (second, first)]
    _, prompt = await chat(engine, client, ANSWER, messages=[*TURN, message, *results, *more], tools=[TOOL])
    called = '<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{"zone": "Zürich"}<|call|>'
    came = '<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>"{}"<|end|>'
    assert prompt.endswith(
        "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>final, Grüße?\n\nSo:<|end|>"
        f"{called}{came.format(first.id)}{called}{came.format(second.id)}"
        "<|start|>user<|message|>bye<|end|><|start|>assistant"
    )


async def test_the_system_says_it_first(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    system = [{"role": role, "content": role} for role in ("system", "developer")]
    _, prompt = await chat(engine, client, ANSWER, messages=[*system, *TURN])
    assert prompt == HI.replace("<|start|>user", "<|start|>developer<|message|>system\n\ndeveloper<|end|><|start|>user")
    with pytest.raises(openai.BadRequestError, match="does not show; want it first"):
        late: Any = [*TURN, {"role": "system", "content": "Be brief."}]
        await client.chat.completions.create(model="tiny", messages=late)


async def test_efforts(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    for said, told in (("minimal", "low"), ("low", "low"), ("high", "high"), ("xhigh", "high")):
        _, prompt = await chat(engine, client, ANSWER, reasoning_effort=said)
        assert prompt == HI.replace("medium", told)
        asking: Any = client.responses.create(model="tiny", input="hi", reasoning={"effort": said})  # type: ignore[typeddict-item]
        assert (await heard(asking, engine, ANSWER))[1] == HI.replace("medium", told)
    kwargs: Any = {"chat_template_kwargs": {"reasoning_effort": 3}}
    for ask in ({"reasoning_effort": "none"}, {"extra_body": kwargs}):
        with pytest.raises(openai.BadRequestError, match="want low, medium or high") as refused:
            await client.chat.completions.create(model="tiny", messages=TURN, **ask)  # type: ignore[call-overload]
        assert refused.value.param == "reasoning_effort"
    with pytest.raises(openai.BadRequestError, match="want low, medium or high") as refused:
        await client.responses.create(model="tiny", input="hi", reasoning={"effort": "none"})
    assert refused.value.param == "reasoning.effort"


async def test_an_answer_that_goes_on(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    more: Any = {"messages": [*TURN, {"role": "assistant", "content": "Grü"}]}
    body = {"continue_final_message": True}
    for stream in (False, True):
        answer, prompt = await chat(engine, client, "ße.<|return|>", stream=stream, extra_body=body, **more)
        assert prompt == HI + "<|channel|>final<|message|>Grü"
        assert shown(answer) == ("", "ße.", [], "stop")
    with pytest.raises(openai.BadRequestError, match="an answer that goes on") as refused:
        tools: Any = {"tools": [TOOL], "tool_choice": "required"}
        await client.chat.completions.create(model="tiny", extra_body=body, **more, **tools)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("text", ["<", "final", "assistant<|channel|>"])
async def test_stops_that_every_answer_would_have(client: AsyncOpenAI, anthropic: AsyncAnthropic, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match="ahead of whatever this model says") as refused:
        await client.chat.completions.create(model="tiny", messages=TURN, stop=["x", text])
    assert refused.value.param == "stop"
    with pytest.raises(BadRequestError, match=f"stop_sequences has '{re.escape(text)}'"):
        await anthropic.messages.create(model="tiny", max_tokens=9, messages=TURN, stop_sequences=[text])


async def test_completions_are_as_they_were(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    answer, _ = await heard(client.completions.create(model="tiny", prompt="hi"), engine, ANSWER)
    assert answer.choices[0].text == "analysisfinal, Grüße?assistantfinalfinal: Grüße."


@pytest.mark.parametrize("stream", [False, True])
async def test_items(engine: TokenizerProcess, client: AsyncOpenAI, stream: bool) -> None:
    """With log-probabilities of what is said, though the same words stand in headers and thoughts."""
    asking: Any = client.responses.create(  # type: ignore[call-overload]
        model="tiny", input="hi", stream=stream, include=["message.output_text.logprobs"]
    )
    answer, prompt = await heard(asking, engine, ANSWER, logged=True)
    assert prompt == HI
    if stream:
        deltas = [event for event in answer if event.type == "response.output_text.delta"]
        streamed = [one.logprob for event in deltas for one in event.logprobs]
        answer = answer[-1].response
    thought, message = answer.output
    assert thought.content[0].text == "final, Grüße?"
    assert answer.output_text == "final: Grüße."
    ids = harmony_tokenizer().encode(ANSWER).ids
    rows = message.content[0].logprobs
    assert b"".join(bytes(row.bytes) for row in rows) == "final: Grüße.".encode()
    end = len(ids) - 1  # but for the last mark
    assert [-row.logprob for row in rows] == list(range(end - len("final: Grüße.".encode()), end))
    assert not stream or streamed == [row.logprob for row in rows]
    num_thought = len(harmony_tokenizer().encode(THOUGHT.removesuffix("<|start|>assistant")).ids)
    assert answer.usage.output_tokens_details.reasoning_tokens == num_thought


async def test_items_go_back(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    tool = {"type": "function", "name": "get_time", "parameters": PARAMETERS, "strict": False}
    ask: Any = {"model": "tiny", "tools": [tool]}
    answer, _ = await heard(client.responses.create(input="hi", **ask), engine, THOUGHT + CALL)
    thought, call = answer.output
    assert (thought.content[0].text, call.name) == ("final, Grüße?", "get_time")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    _, prompt = await heard(client.responses.create(input=[*TURN, thought, call, result], **ask), engine, ANSWER)
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>final, Grüße?<|end|>"
        '<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{"zone": "Zürich"}<|call|>'
        '<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>"12:00"<|end|><|start|>assistant'
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks(engine: TokenizerProcess, anthropic: AsyncAnthropic, stream: bool) -> None:
    tool: Any = {"name": "get_time", "input_schema": PARAMETERS}
    effort: Any = {"effort": "max"}
    asking: Any = anthropic.messages.create(
        model="tiny", max_tokens=400, messages=TURN, tools=[tool], stream=stream, output_config=effort
    )
    answer, prompt = await heard(asking, engine, THOUGHT + CALL)
    assert "Effort: high" in prompt
    if stream:
        begun = [event.content_block.type for event in answer if event.type == "content_block_start"]
        deltas = [event.delta for event in answer if event.type == "content_block_delta"]
        assert begun == ["thinking", "tool_use"]
        assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == "final, Grüße?"
        assert json.loads(deltas[-1].partial_json) == {"zone": "Zürich"}
        assert answer[-2].delta.stop_reason == "tool_use"
    else:
        thought, call = answer.content
        assert (thought.thinking, call.name, call.input) == ("final, Grüße?", *GET_TIME)
        assert answer.stop_reason == "tool_use"
    answer, _ = await heard(anthropic.messages.create(model="tiny", max_tokens=9, messages=TURN), engine, ANSWER)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "final: Grüße."
    assert answer.stop_reason == "end_turn"


async def test_tokens_of_a_conversation(url: str, engine: TokenizerProcess) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        ids = (await client.post("/tokenize", json={"messages": TURN})).json()["tokens"]
    assert harmony_tokenizer().decode(ids, skip_special_tokens=False) == HI
