"""Anthropic's Messages through the HTTP door, as its own client asks and reads."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from http_process import http_process
from played_messages import CALL, CALLED, TEMPLATE, TOOL, TURN, asked, make_client, next_submit, play, prompt_of, say
from tercet.ipc.step_messages import Abort
from tokenizer_process import USAGE, TokenizerProcess, byte_checkpoint, tokenizer_process


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    with tokenizer_process(byte_checkpoint(tmp_path_factory.mktemp("messages"), TEMPLATE), max_model_len=4096) as one:
        yield one


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with make_client(url) as client:
        yield client


async def test_a_plain_answer(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    answer, prompt, submit = await say(engine, client, "Hello, Zoë.")
    assert prompt == "<user>hi<assistant>"
    assert submit.sampling.max_tokens == 400
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert answer.id.startswith("msg_")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello, Zoë."}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.to_dict() == {
        "input_tokens": USAGE.num_prompt_tokens - USAGE.num_cached_tokens,
        "output_tokens": USAGE.num_generated_tokens,
        "cache_read_input_tokens": USAGE.num_cached_tokens,
        "cache_creation_input_tokens": 0,
    }
    assert answer._request_id


async def test_what_is_read_from_the_cache_is_no_input(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    assert USAGE.num_cached_tokens == 1
    answer, prompt, _ = await say(engine, client, "x", stream=True)
    start, delta = answer[0], answer[-2]
    assert start.message.usage.input_tokens == len(prompt.encode())  # a byte is a token; nobody knows yet
    assert start.message.usage.output_tokens == 0
    assert delta.usage.input_tokens == USAGE.num_prompt_tokens - 1
    assert (delta.usage.cache_read_input_tokens, delta.usage.output_tokens) == (1, USAGE.num_generated_tokens)


async def test_streamed(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    events, _, _ = await say(engine, client, f"<think>Hm.</think>See:{CALL}\n{CALL} So", stream=True, tools=[TOOL])
    kinds = [event.type for event in events]
    assert (kinds[0], *kinds[-2:]) == ("message_start", "message_delta", "message_stop")
    assert events[0].message.content == []
    assert events[0].message.stop_reason is None
    # Each block is begun, continued and completed before the next.
    of_blocks = [(event.type, event.index) for event in events[1:-2]]
    assert [index for _, index in of_blocks] == sorted(index for _, index in of_blocks)
    for index in range(5):
        first, *between, last = [kind for kind, of in of_blocks if of == index]
        assert (first, last) == ("content_block_start", "content_block_stop")
        assert set(between) == {"content_block_delta"}
    begun = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use", "tool_use", "text"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == "Hm."
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == "See: So"
    inputs = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert [json.loads(one) for one in inputs] == [{"zone": "Zürich"}] * 2
    assert (events[-2].delta.stop_reason, events[-2].delta.stop_sequence) == ("tool_use", None)


@pytest.mark.parametrize("says", [f"<think>Hm.</think>See:{CALL}\n{CALL} So", "Plain é", "", CALL])
async def test_the_client_s_helper_reads_what_is_said_at_once(
    engine: TokenizerProcess, client: AsyncAnthropic, says: str
) -> None:
    async def accumulate() -> Any:
        async with client.messages.stream(**asked(tools=[TOOL])) as stream:
            return await stream.get_final_message()

    whole = (await say(engine, client, says, tools=[TOOL])).answer
    asking = asyncio.ensure_future(accumulate())
    submit = await next_submit(engine)
    await asyncio.to_thread(play, engine, submit, says)
    final = await asking
    shown = [[told(block) for block in message.content] for message in (whole, final)]
    assert shown[0] == shown[1]
    assert (final.stop_reason, final.usage.to_dict()) == (whole.stop_reason, whole.usage.to_dict())


def told(block: Any) -> dict[str, Any]:
    """What is no name made up for one answer."""
    return {name: value for name, value in block.to_dict().items() if name not in ("id", "signature")}


async def test_calls_and_thoughts_come_back(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    """As the client's own objects say them; then come what the calls gave, and what the user says to that."""
    says = f"<think>The time.</think>Let me see.{CALL}\n{CALL}"
    answer = (await say(engine, client, says, tools=[TOOL])).answer
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.stop_reason == "tool_use"
    thinking, _, first, second = answer.content
    assert (thinking.thinking, thinking.signature) == ("The time.", answer.id)
    assert (first.name, first.input) == ("get_time", {"zone": "Zürich"})
    assert first.id != second.id
    for call in (first, second):
        assert len(call.id) == 9
        assert call.id.isalnum()

    results = [
        {"type": "text", "text": "And now?"},
        {"type": "tool_result", "tool_use_id": first.id, "content": "12:00"},
        {
            "type": "tool_result",
            "tool_use_id": second.id,
            "is_error": True,
            "content": [{"type": "text", "text": "no"}],
        },
    ]
    turns = [*TURN, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    _, prompt, _ = await say(engine, client, "Noon.", messages=turns, tools=[TOOL])
    call_text = '<tool_call>{"name": "get_time", "arguments": {"zone": "Zürich"}}</tool_call>'
    assert prompt.endswith(
        f"<user>hi<assistant>Let me see.<think>The time.</think>{call_text * 2}"
        f"<tool>12:00({first.id})<tool>Error: no({second.id})<user>And now?<assistant>"
    )
    shown = {"type": "function", "function": {**TOOL, "parameters": TOOL["input_schema"]}}
    del shown["function"]["input_schema"]
    assert prompt.startswith(f"<tools>{json.dumps(shown, ensure_ascii=False)}</tools>")


async def test_half_a_character_in_a_call(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    says = CALL.replace("Zürich", r"\ud83d")
    events = (await say(engine, client, says, tools=[TOOL], stream=True)).answer
    inputs = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert inputs == [r'{"zone": "\ud83d"}']
    asking = asyncio.ensure_future(client.messages.with_raw_response.create(**asked(tools=[TOOL])))
    submit = await next_submit(engine)
    await asyncio.to_thread(play, engine, submit, says)
    assert rb'"input":{"zone": "\ud83d"}' in await (await asking).read()


async def test_thoughts_that_the_client_leaves_out(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    says, thinking = "<think>Hm.</think>Yes", {"type": "adaptive", "display": "omitted"}
    answer = (await say(engine, client, says, thinking=thinking)).answer
    assert [told(block) for block in answer.content] == [
        {"type": "thinking", "thinking": ""},
        {"type": "text", "text": "Yes"},
    ]
    events = (await say(engine, client, says, thinking=thinking, stream=True)).answer
    assert "thinking_delta" not in [event.delta.type for event in events if event.type == "content_block_delta"]
    turns = [*TURN, {"role": "assistant", "content": answer.content}, *TURN]
    assert (await say(engine, client, "x", messages=turns)).prompt == "<user>hi<assistant>Yes<user>hi<assistant>"


async def test_the_end_of_room(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    answer = (await say(engine, client, "abc", reason="length", max_tokens=3)).answer
    assert (answer.content[0].text, answer.stop_reason) == ("abc", "max_tokens")
    events = (await say(engine, client, CALL, reason="length", tools=[TOOL], stream=True)).answer
    assert events[-2].delta.stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("calls", [False, True])
async def test_stop_sequences(engine: TokenizerProcess, client: AsyncAnthropic, stream: bool, calls: bool) -> None:
    request = asked(stop_sequences=["END", "stop"], stream=stream, tools=[TOOL])
    asking = asyncio.ensure_future(client.messages.create(**request))
    submit = await next_submit(engine)
    await asyncio.to_thread(engine.sample, submit.number, (CALL if calls else "") + " so stop it")
    answer = await asking
    end = [event async for event in answer][-2].delta if stream else answer
    assert (end.stop_reason, end.stop_sequence) == ("tool_use" if calls else "stop_sequence", "stop")
    if not stream:
        assert answer.content[-1].text == " so "
    assert isinstance(await asyncio.to_thread(engine.next_message), Abort)


async def test_tokens_are_counted_as_for_an_answer(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    thinking: Any = {"type": "adaptive"}
    request: Any = {"messages": TURN, "system": "Be kind.", "tools": [TOOL], "thinking": thinking}
    prompt = (await say(engine, client, "x", **request)).prompt
    count = await client.messages.count_tokens(model="tiny", **request)
    assert count.input_tokens == len(prompt.encode())
    begun = await client.messages.count_tokens(model="tiny", messages=[*TURN, {"role": "assistant", "content": "x"}])
    assert begun.input_tokens == len(b"<user>hi<assistant>x")
    called = await client.messages.count_tokens(model="tiny", messages=[*TURN, CALLED])  # nobody could answer that
    assert called.input_tokens > begun.input_tokens


async def test_a_template_that_thinks_by_default(tmp_path: Path) -> None:
    """Told not to, it does not; and the answer is read so."""
    source = "{{ messages[0].content }}{{ '</think>' if enable_thinking is false else '<think>' }}"
    with tokenizer_process(byte_checkpoint(tmp_path, source)) as engine, http_process(engine) as url:
        async with make_client(url) as client:
            for kind in ("enabled", "adaptive", None):
                thinking = {"type": kind, **({"budget_tokens": 1024} if kind == "enabled" else {})}
                changes = {} if kind is None else {"thinking": thinking}
                answer, prompt, _ = await say(engine, client, "Hm.</think>Yes", **changes)
                assert prompt == "hi<think>"
                assert [block.type for block in answer.content] == ["thinking", "text"]
            answer, prompt, submit = await say(engine, client, "Yes", thinking={"type": "disabled"})
            assert (prompt, prompt_of(submit)) == ("hi</think>", prompt)
            assert [told(block) for block in answer.content] == [{"type": "text", "text": "Yes"}]
