"""Anthropic's own client in front of real tokenizer and HTTP processes; the test plays the model."""

import asyncio
from typing import Any, NamedTuple

import msgspec
from anthropic import AsyncAnthropic

from tercet.ipc.step_messages import Ended, Started, Submit
from test_engine_http_tools import HERMES
from tokenizer_process import EOS, USAGE, TokenizerProcess, byte_tokenizer, tokens

TEMPLATE = HERMES + "{% if enable_thinking is defined and not enable_thinking %}?{% endif %}"
TURN: Any = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "name": "get_time",
    "description": "Zeit für Zone",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "abcdefghi", "name": "get_time", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "abcdefghi"}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "Zürich"}}\n</tool_call>'


class Told(NamedTuple):
    """What came of a request."""

    answer: Any
    """A message, or the events of a stream."""
    prompt: str
    submit: Submit


def make_client(url: str, **more: Any) -> AsyncAnthropic:
    return AsyncAnthropic(**{"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 20.0, **more})


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 400, "messages": TURN, **changes}


async def next_submit(engine: TokenizerProcess) -> Submit:
    return await asyncio.to_thread(engine.next_submit)


def prompt_of(submit: Submit) -> str:
    return byte_tokenizer().decode(memoryview(submit.prompt_ids).cast("i").tolist(), skip_special_tokens=False)


def play(engine: TokenizerProcess, submit: Submit, says: str, *, reason: Any = "stop") -> None:
    """A step for each byte, and the end."""
    stop_id = EOS if reason == "stop" else None
    end = Ended(submit.number, reason, stop_id, USAGE)
    ids = byte_tokenizer().encode(says + "</s>" * (reason == "stop")).ids
    for place, token_id in enumerate(ids):
        step = tokens({submit.number: token_id}, end if place == len(ids) - 1 else None)
        begun = (Started(submit.number, USAGE.num_cached_tokens, 0.1, 0.2),) if place == 0 else ()
        engine.send(msgspec.structs.replace(step, started=begun))


async def say(
    engine: TokenizerProcess, client: AsyncAnthropic, says: str, *, reason: Any = "stop", **changes: Any
) -> Told:
    """What the client makes of a model that says so."""
    asking = asyncio.ensure_future(client.messages.create(**asked(**changes)))
    submit = await next_submit(engine)
    answer, _ = await asyncio.gather(asking, asyncio.to_thread(play, engine, submit, says, reason=reason))
    return Told([event async for event in answer] if changes.get("stream") else answer, prompt_of(submit), submit)
