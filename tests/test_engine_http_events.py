"""The bytes of a stream's events: those of plain pieces, made the short way, are what the long way makes."""

import random
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tercet.engine.chat_reader import ChatReader
from tercet.engine.http_chat import _ChatChunks
from tercet.engine.http_completions import _CompletionChunks
from tercet.engine.http_events import Chunks, events
from tercet.engine.openai_requests import UsageWanted
from tercet.ipc.answers import ReasoningFormat, Usage
from tercet.ipc.client import Generation, Piece

CHARACTERS = 'ab "\\\n\r\t\0{}<>/é東🙂\N{OBJECT REPLACEMENT CHARACTER}\u2028\u2029\x85'
ANSWER: Any = SimpleNamespace(id="x-1", created=1, model='of "text"', usage=lambda generations: None)


def make_completion() -> Chunks[Any]:
    return _CompletionChunks(ANSWER, with_ids=False)


def chat_with(reasoning: ReasoningFormat) -> Callable[[], Chunks[Any]]:
    return lambda: _ChatChunks(ANSWER, lambda: ChatReader(reasoning, "none", None), with_ids=False)


async def as_events(pieces: list[tuple[int, Piece]], chunks: Chunks[Any], with_usage: bool) -> list[bytes]:
    async def come() -> AsyncGenerator[tuple[int, Piece], None]:
        for piece in pieces:
            yield piece

    usage: UsageWanted = "at_end" if with_usage else "never"
    return [event async for event in events(come(), chunks, ANSWER, usage, {"prompt": "prompt"})]


def pieces_of(draw: random.Random) -> list[tuple[int, Piece]]:
    """Two answers, told in turn."""
    texts = [["<think>", " so ", "</think>", "\n", "then"], []]
    for one in texts:
        one += ["".join(draw.choices(CHARACTERS, k=draw.randrange(4))) for _ in range(20)]
    pieces = [(index, Piece(text, [7])) for index, one in enumerate(texts) for text in one]
    rest = pieces[5:]
    draw.shuffle(rest)
    end = Generation("", [], "stop", None, Usage(1, 1, 0, 0, 0.0, 0.0, 0.0))
    return [*pieces[:5], *rest, *((index, Piece("!", [8], end)) for index in (0, 1))]


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("make", [make_completion, chat_with("none"), chat_with("think"), chat_with("think_opened")])
async def test_short_and_long_way(
    make: Callable[[], Chunks[Any]], with_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = pieces_of(random.Random())
    chunks, is_plain = make(), type(make()).is_plain
    taken = []
    monkeypatch.setattr(
        type(chunks), "is_plain", lambda self, *piece: taken.append(is_plain(self, *piece)) or taken[-1]
    )
    short = await as_events(pieces, chunks, with_usage)
    assert sum(taken) > 3
    monkeypatch.setattr(type(chunks), "is_plain", lambda self, *piece: False)
    assert short == await as_events(pieces, make(), with_usage)
    assert all(msgspec.json.decode(line[6:]) for event in short for line in event.split(b"\n\n")[:-1] if b"{" in line)


@pytest.mark.parametrize("make", [make_completion, chat_with("none")])
async def test_each_event_is_one_line_to_every_client(make: Callable[[], Chunks[Any]]) -> None:
    """httpx and others part lines as `splitlines` does."""
    said = "".join(map(chr, range(0x100))) + "\u2028\u2029é東🙂"
    end = Generation("", [], "stop", None, Usage(1, 1, 0, 0, 0.0, 0.0, 0.0))
    pieces = [(0, Piece("", [1])), (0, Piece(said, [7])), (0, Piece(said, [7], end))]
    lines = b"".join(await as_events(pieces, make(), with_usage=False)).decode().splitlines()
    assert all(line.startswith("data: ") for line in lines[::2])
    assert not any(lines[1::2])
    chunks = [msgspec.json.decode(line[6:]) for line in lines[:-2:2]]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices) == said * 2
