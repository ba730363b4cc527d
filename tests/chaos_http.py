"""One streamed completion over HTTP and a socket of its own, for tests where the door may die at any moment.

It knows HTTP/1.1 just well enough; what was cut off is told apart from what came to its end.
"""

import asyncio
import json
from contextlib import suppress
from typing import Any

import msgspec

from tercet.ipc.messages import SamplingParams


class Cut(Exception):
    """The connection ended before the answer had."""


class Refused(Cut):
    """There was no connection."""


class Answer(msgspec.Struct):
    """What a stream has said so far."""

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_events: int = 0


async def ask_http(address: str, prompt: list[int], params: SamplingParams, leave_after: int | None = None) -> Answer:
    """The answer, whole or up to so many events. Raises `Cut`, and `ValueError` for what no door should say."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        raise Refused(str(error)) from None
    try:
        writer.write(_request(prompt, params))
        return await _read(reader, leave_after)
    except OSError as error:
        raise Cut(str(error)) from None
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


def _request(prompt: list[int], params: SamplingParams) -> bytes:
    body = json.dumps(
        {
            "model": params.adapter,
            "prompt": prompt,
            "temperature": params.temperature,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "stop": params.stop or None,
            "ignore_eos": params.ignore_eos,
            "structured_outputs": None if params.structured is None else {"regex": params.structured.regex},
            "return_token_ids": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _read(reader: asyncio.StreamReader, leave_after: int | None) -> Answer:
    answer = Answer()
    status = (await reader.readline()).decode()
    if not status.endswith("\n"):
        raise Cut("before the status")
    if status.split()[1] != "200":
        raise ValueError(f"{status.strip()}: {(await reader.read()).decode(errors='replace')[-300:]}")
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            return answer
        if line.startswith(b"data: ") and line.endswith(b"\n"):
            _take(json.loads(line[6:]), answer)
            if answer.num_events == leave_after:
                return answer
    raise Cut(f"after {answer.num_events} events")


def _take(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise ValueError(f"the door says {event['error']}")
    (choice,) = event["choices"]
    answer.num_events += 1
    answer.text += choice["text"]
    answer.token_ids += choice["token_ids"]
    answer.finish_reason, answer.stop_reason = choice["finish_reason"], choice["stop_reason"]
