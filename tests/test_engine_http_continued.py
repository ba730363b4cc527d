"""Answers that have begun in the client's last turn: of chats, in vLLM's words, and of Anthropic's messages."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from played_messages import make_client, say
from test_engine_http_tools import CALL, HERMES, TOOL, chat
from tokenizer_process import TokenizerProcess, byte_checkpoint, tokenizer_process

TEMPLATE = HERMES + "{% if false %}</think>{% endif %}"
TURNS: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The time"}]
GOES_ON = {"continue_final_message": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    with tokenizer_process(byte_checkpoint(tmp_path_factory.mktemp("begun"), TEMPLATE), max_model_len=4096) as one:
        yield one


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def anthropics(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with make_client(url) as client:
        yield client


async def test_a_chat(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    """What comes is what is new, and no more thoughts begin."""
    extra: dict[str, Any] = {"messages": TURNS, "extra_body": {**GOES_ON, "add_generation_prompt": False}}
    answer, prompt = await chat(engine, client, " is <think>noon</think>.", **extra)
    assert prompt == "<user>hi<assistant>The time"
    (choice,) = answer.choices
    assert choice.message.content == " is <think>noon</think>."
    chunks, prompt = await chat(engine, client, " is noon.", stream=True, **extra)
    assert prompt == "<user>hi<assistant>The time"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " is noon."


async def test_thoughts_and_calls_go_on(engine: TokenizerProcess, client: AsyncOpenAI) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "<think>Hm"}]
    answer, prompt = await chat(
        engine, client, ", noon.</think>See: " + CALL, messages=turns, tools=[TOOL], extra_body=GOES_ON
    )
    assert prompt.endswith("<user>hi<assistant><think>Hm")
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (", noon.", "See: ")
    assert json.loads(message.tool_calls[0].function.arguments) == {"zone": "Zürich"}
    turns = [TURNS[0], {"role": "assistant", "content": "<think>Hm</think>So"}]
    answer, _ = await chat(engine, client, " be it", messages=turns, extra_body=GOES_ON)
    assert answer.choices[0].message.content == " be it"
    assert not hasattr(answer.choices[0].message, "reasoning_content")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({**GOES_ON, "add_generation_prompt": True}, "continue_final_message", "are true; want one of them"),
        ({**GOES_ON, "messages": TURNS[:1]}, "messages", "messages ends with a turn of the user; want the assistant"),
    ],
)
async def test_refusals(client: AsyncOpenAI, body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        await client.chat.completions.create(model="tiny", messages=TURNS, extra_body=body)
    assert refused.value.param == param


async def test_tokens(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        asked = {"messages": TURNS, **GOES_ON}
        found = (await client.post("/tokenize", json=asked)).json()
        assert found["count"] == len("<user>hi<assistant>The time")
        for name in ("continue_final_message", "add_generation_prompt"):
            refused = await client.post("/tokenize", json={"prompt": "hi", name: True})
            assert refused.status_code == 400
            assert f"{name} came without messages" in refused.json()["error"]["message"]


async def test_a_message(engine: TokenizerProcess, anthropics: AsyncAnthropic) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": [{"type": "text", "text": "The time"}]}]
    answer, prompt, _ = await say(engine, anthropics, " is noon.", messages=turns)
    assert prompt == "<user>hi<assistant>The time"
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": " is noon."}]
    counted = await anthropics.messages.count_tokens(model="tiny", messages=turns)  # type: ignore[arg-type]
    assert counted.input_tokens == len(prompt)


async def test_messages_that_cannot_go_on(anthropics: AsyncAnthropic) -> None:
    called: Any = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    calls: Any = [TURNS[0], {"role": "assistant", "content": [called]}]
    thinks: Any = {"thinking": {"type": "enabled", "budget_tokens": 100}}
    for messages, more, words in (
        (calls, {}, "messages ends with calls of the assistant"),
        (TURNS, thinks, "thinking is not disabled, and messages ends with an answer that has begun"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=words):
            await anthropics.messages.create(model="tiny", max_tokens=20, messages=messages, **more)
        counted = await anthropics.messages.count_tokens(model="tiny", messages=messages, **more)
        assert counted.input_tokens > 0  # whatever could be answered
