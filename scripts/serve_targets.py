"""Who is asked in a load test: our own socket, or any OpenAI-compatible endpoint. Each fills a `Timeline`.

Both note when the bytes of a token came, which is read from the clock once for all that came together: what this
program does with sixty others first is no part of what it measures.
"""

import asyncio
import ssl
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from http_exchange import Exchange, Take
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
                    timeline.arrivals.append(self._client.last_heard)
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
        self._idle: list[Exchange] = []
        """Connections whose last answer has been read to its end."""

    async def first_model(self) -> str:
        """The name of the first model that the endpoint lists, for those who named none."""
        parts: list[bytes] = []
        await self._exchange("GET", "/models", b"", lambda part, _: parts.append(part))
        self._model = str(msgspec.json.decode(b"".join(parts))["data"][0]["id"])
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
        events = _Events(timeline)
        try:
            await self._exchange("POST", "/completions", msgspec.json.encode(body), events.take)
            if not events.is_done:
                raise EOFError("the answer ended without [DONE]")
        except (OSError, EOFError, ValueError) as error:
            timeline.error = f"{type(error).__name__}: {error}"

    async def _exchange(self, method: str, path: str, body: bytes, take: Take) -> None:
        exchange = await self._connect()
        key = f"Authorization: Bearer {self._api_key}\r\n" if self._api_key else ""
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._authority}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await exchange.ask(head.encode() + body, take)
        if exchange.can_serve:
            self._idle.append(exchange)

    async def _connect(self) -> Exchange:
        while self._idle:
            if (exchange := self._idle.pop()).can_serve:
                return exchange
        loop = asyncio.get_running_loop()
        _, exchange = await loop.create_connection(Exchange, self._host, self._port, ssl=self._tls)
        return exchange


class _Choice(msgspec.Struct):
    text: str | None = None


class _Event(msgspec.Struct):
    """What counts of a chunk."""

    choices: list[_Choice] = []
    usage: dict[str, object] | None = None
    error: object = None


class _Events:
    """From the parts of a body to the arrivals of a timeline; where parts end means nothing."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._rest = b""
        self.is_done = False

    def take(self, part: bytes, now: float) -> None:
        """Raises `ValueError` for an error that the endpoint tells, and for what is no JSON."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.is_done = True  # and on to the end of the body, so that the connection can serve again
            else:
                self._note(_decode(data), now)

    def _note(self, event: _Event, now: float) -> None:
        timeline = self._timeline
        if event.error is not None:
            raise ValueError(f"the endpoint says {event.error}")
        if event.choices and event.choices[0].text:
            timeline.arrivals.append(now)
            timeline.num_tokens = max(timeline.num_tokens, len(timeline.arrivals))  # until the usage says
        if event.usage:
            num_tokens = event.usage.get("completion_tokens")
            if not isinstance(num_tokens, int):
                raise ValueError(f"the usage has completion_tokens {num_tokens!r}; want a number")
            timeline.num_tokens = num_tokens


_decode = msgspec.json.Decoder(_Event).decode
