"""Who is asked in a load test: our own socket, or any OpenAI-compatible endpoint. Each fills a `Timeline`.

The HTTP side is a few lines of HTTP/1.1 over asyncio, which keeps connections for the next request, as OpenAI's clients
do: whatever package is installed, the client costs little and its clock is read where bytes arrive.
"""

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from serve_report import Timeline
from tercet.ipc.client import Client, ClientError
from tercet.ipc.messages import SamplingParams


class Target(Protocol):
    """Someone who continues token ids."""

    async def ask(self, prompt: list[int], num_tokens: int, timeline: Timeline) -> None:
        """Stream an answer of so many tokens, noting what comes when."""
        ...


class SocketTarget:
    """Tercet's own wire."""

    def __init__(self, client: Client, temperature: float) -> None:
        self._client = client
        self._temperature = temperature

    async def ask(self, prompt: list[int], num_tokens: int, timeline: Timeline) -> None:
        params = SamplingParams(temperature=self._temperature, max_tokens=num_tokens, ignore_eos=True)
        try:
            async for piece in self._client.stream(prompt, params):
                if piece.token_ids:
                    timeline.arrivals.append(time.perf_counter())
                    timeline.num_tokens += len(piece.token_ids)
        except ClientError as error:
            timeline.error = f"{error.code}: {error}"


class OpenAITarget:
    """`POST {base_url}/completions` with token ids, streamed."""

    def __init__(self, base_url: str, model: str, temperature: float, api_key: str | None = None) -> None:
        """`base_url` as OpenAI's clients take it: http://127.0.0.1:8000/v1."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url {base_url!r}; want http://HOST:PORT/v1 or https://…")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._model = model
        self._temperature = temperature
        self._api_key = api_key
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        """Connections whose last answer has been read to its end."""

    async def first_model(self) -> str:
        """The name of the first model that the endpoint lists, for those who named none."""
        body = b"".join([part async for part in self._request("GET", "/models", b"")])
        self._model = str(msgspec.json.decode(body)["data"][0]["id"])
        return self._model

    async def ask(self, prompt: list[int], num_tokens: int, timeline: Timeline) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async for event in _events(self._request("POST", "/completions", msgspec.json.encode(body))):
                _note(event, timeline)
        except (OSError, EOFError, ValueError) as error:
            timeline.error = f"{type(error).__name__}: {error}"

    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The body of the answer as it arrives. Raises `ValueError` unless its status is 200."""
        reader, writer = await self._connect()
        is_whole = False
        try:
            key = f"Authorization: Bearer {self._api_key}\r\n" if self._api_key else ""
            writer.write(
                f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._authority}\r\n{key}"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            is_chunked = "transfer-encoding: chunked" in head
            parts = _chunks(reader) if is_chunked else _rest(reader, head)
            status = head.split(maxsplit=2)[1]
            if status != "200":
                words = b"".join([part async for part in parts]).decode(errors="replace")
                raise ValueError(f"HTTP {status}: {words[:300]}")
            async for part in parts:
                yield part
            is_whole = "connection: close" not in head and (is_chunked or "content-length:" in head)
        finally:
            if is_whole:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What chunks hold, with one wait for all that have come."""
    buffer = b""
    while True:
        end = buffer.find(b"\r\n")
        size = int(buffer[:end].split(b";")[0], 16) if end >= 0 else 0
        behind = end + 2 + size + 2
        if end < 0 or len(buffer) < behind:
            if not (more := await reader.read(65_536)):
                raise EOFError("the connection ended within an answer")
            buffer += more
        elif not size:
            return
        else:
            chunk, buffer = buffer[end + 2 : behind - 2], buffer[behind:]
            yield chunk


async def _rest(reader: asyncio.StreamReader, head: str) -> AsyncIterator[bytes]:
    """As long as its head says, or until the connection ends."""
    if found := re.search(r"content-length: *(\d+)", head):
        yield await reader.readexactly(int(found[1]))
        return
    while part := await reader.read(65_536):
        yield part


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """The JSON of each `data:` line; an answer that ends without `[DONE]` was cut off."""
    rest, is_done = b"", False
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                is_done = True  # and on to the end of the body, so that the connection can serve again
                continue
            yield msgspec.json.decode(data)
    if not is_done:
        raise EOFError("the answer ended without [DONE]")


def _note(event: dict[str, Any], timeline: Timeline) -> None:
    if "error" in event:
        raise ValueError(f"the endpoint says {event['error']}")
    if event.get("choices") and event["choices"][0].get("text"):
        timeline.arrivals.append(time.perf_counter())
        timeline.num_tokens = max(timeline.num_tokens, len(timeline.arrivals))  # until the usage says
    if event.get("usage"):
        timeline.num_tokens = event["usage"]["completion_tokens"]
