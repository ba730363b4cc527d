"""Requests over HTTP, whole and streamed, some left half-way, some read slowly; each answer has to be whole.

Speaks HTTP by hand, so that it can read as slowly and leave as rudely as it likes.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_SILENCE_S = 60.0
_LETTERS = "etaoinsrhl"
_WORDS = ["the", "rain", "in", "Spain", "stays", "mainly", "where", "it", "falls", "and", "nobody", "knows", "why"]


@dataclass
class HttpLoad:
    """Keeps some requests in an engine's HTTP door until told otherwise."""

    address: str
    """HOST:PORT."""
    longest_output: int
    seed: int
    slow: float = 0.1
    """Share of streams that are read a little at a time."""
    left: float = 0.2
    """Share of streams whose client leaves on the way."""
    sent: int = 0
    ended: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    async def run(self, more: Callable[[], bool], concurrency: int) -> None:
        """While `more()`; ends when the last answer has."""
        async with asyncio.TaskGroup() as clients:
            for number in range(concurrency):
                clients.create_task(self._client(more, random.Random(f"{self.seed} {number}")))

    async def _client(self, more: Callable[[], bool], draw: random.Random) -> None:
        while more():
            try:
                reason = await self._ask(draw)
            except (AssertionError, OSError, EOFError, ValueError, TimeoutError) as error:
                reason = "fault"
                self.violations.append(f"over HTTP: {error!r}")
            self.ended += 1
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    async def _ask(self, draw: random.Random) -> str:
        """One request; what its answer ended with."""
        self.sent += 1
        streamed = draw.random() < 0.7
        stop = draw.sample(_LETTERS, 2) if draw.random() < 0.3 else []
        body: dict[str, Any] = {
            "prompt": " ".join(draw.choices(_WORDS, k=draw.randint(1, 20))),
            "max_tokens": draw.randint(1, self.longest_output),
            "temperature": draw.choice([0.0, 0.7, 1.0]),
            "seed": draw.randrange(2**32),
            "stop": stop,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        leave_after = draw.randint(0, body["max_tokens"]) if draw.random() < self.left else None
        pause = draw.uniform(0.1, 0.5) if draw.random() < self.slow else 0.0
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        try:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
            status = await asyncio.wait_for(reader.readline(), _SILENCE_S)
            assert b" 200 " in status, status
            while (await reader.readline()).strip():
                pass
            if streamed:
                return await self._stream(reader, body, leave_after, pause)
            return _checked(body, [json.loads(await asyncio.wait_for(reader.read(), _SILENCE_S))])
        finally:
            writer.transport.abort()

    async def _stream(
        self, reader: asyncio.StreamReader, body: dict[str, Any], leave_after: int | None, pause: float
    ) -> str:
        chunks: list[dict[str, Any]] = []
        while True:
            line = await asyncio.wait_for(reader.readline(), _SILENCE_S)
            assert line, f"a stream ended without [DONE] after {chunks[-1:]}"
            if line.startswith(b"data: [DONE]"):
                return _checked(body, chunks)
            if line.startswith(b"data: {"):
                if leave_after == len(chunks):
                    return "left"
                chunks.append(json.loads(line.removeprefix(b"data: ")))
                await asyncio.sleep(pause)


def _checked(body: dict[str, Any], chunks: list[dict[str, Any]]) -> str:
    """The reason of a whole answer; raises AssertionError when it is not what was asked for."""
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    assert not errors, errors
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1, reasons
    count = chunks[-1]["usage"]["completion_tokens"]
    assert reasons[0] == "stop" or count == body["max_tokens"], (reasons, count, body)
    assert not any(stop in text for stop in body["stop"]), (text, body)
    return str(reasons[0])
