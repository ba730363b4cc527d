"""Whole answers that are made as they are sent: they say what they would if made at once, nobody else waits for them,
and who does not take them is given up."""

import asyncio
import json
import random
import socket
from typing import Any

import httpx
import msgspec
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from daemon import free_port
from tercet.engine import http_presence
from tercet.engine.http_echo import Echo
from tercet.engine.http_presence import ClientGone
from tercet.engine.http_server import _Server, _uvicorn_config, bind
from tercet.engine.http_stream import Stream, json_answer
from tercet.engine.json_parts import as_list, in_parts, in_runs, run
from tercet.engine.openai_logprobs import (
    Later,
    Rows,
    chat_logprobs,
    columns,
    completion_logprobs,
    copies,
    later_chat_logprobs,
    later_completion_logprobs,
    prompt_logprobs,
)
from tercet.ipc.answers import TokenLogprob
from tercet.ipc.rows import PackedRows

TOKENS = [b" the", b"\0", b'"\\', b"\xc3", "東".encode(), b"\n", b""]


def random_rows(count: int, num_top: int = 3) -> PackedRows:
    draw = random.Random(count)
    return PackedRows(
        tuple(
            TokenLogprob(draw.randrange(999), -draw.random(), rank, draw.choice(TOKENS)) for rank in range(1 + num_top)
        )
        for _ in range(count)
    )


def joined(body: object, later: Later) -> Any:
    return json.loads(b"".join(in_parts(msgspec.json.encode(body), later)))


def at_once(body: object) -> Any:
    return json.loads(msgspec.json.encode(body))


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_made_later_is_made_alike(count: int) -> None:
    rows = random_rows(count)
    later: Later = []
    assert joined({"text": "a\0b", "x": later_chat_logprobs(rows, later), "y": 1}, later) == {
        "text": "a\0b",
        "x": at_once(chat_logprobs(rows)),
        "y": 1,
    }
    later = []
    assert joined(later_completion_logprobs([columns(rows, 7)], later), later) == at_once(completion_logprobs(rows, 7))
    shown = json.loads(b"".join(prompt_logprobs(rows, 1)))
    assert [None if one is None else list(one) for one in shown] == [
        None,
        *(list(dict.fromkeys(str(one.token_id) for one in row[:2])) for row in rows),
    ]


@pytest.mark.parametrize("begin", ["", "<s>"])
def test_of_a_prompt_and_its_answers(begin: str) -> None:
    """What the answers share is there for each of them, before its own."""
    rows, own = random_rows(600), [random_rows(3), random_rows(300)]
    text = "x" + "".join(row[0].text for row in rows)
    later: Later = []
    shared = copies(Echo(text, begin or "x").columns(rows, 2), 2)
    body = [later_completion_logprobs([shared[place], columns(own[place], len(text))], later) for place in range(2)]
    for said, answer in zip(joined(body, later), own, strict=True):
        prompt = completion_logprobs([row[:3] for row in rows], 0 if begin else 1)
        after = completion_logprobs(answer, len(text))
        assert prompt is not None
        assert after is not None
        assert said["tokens"] == [begin or "x", *prompt.tokens, *after.tokens]
        assert said["token_logprobs"] == [None, *prompt.token_logprobs, *after.token_logprobs]
        assert said["top_logprobs"] == [None, *prompt.top_logprobs, *after.top_logprobs]
        assert said["text_offset"] == [0, *prompt.text_offset, *after.text_offset]


def test_of_a_prompt_whose_text_lacks_its_first_token_s_space() -> None:
    rows = [[TokenLogprob(index, -1.0, 1, token)] for index, token in enumerate((b" one", b" two", b"!"))]
    later: Later = []
    body = [later_completion_logprobs([Echo("one two!", "<s>").columns(rows, 1)], later)]
    (said,) = joined(body, later)
    assert said["tokens"] == ["<s>", " one", " two", "!"]
    assert said["text_offset"] == [0, 0, 3, 7]


def test_tokens_that_are_parts_of_characters_begin_where_those_do() -> None:
    tokens = (b"na", b"\xc3", b"\xaf", b"ve \xf0\x9f", b"\x99", b"\x82", b"!")
    rows = [[TokenLogprob(index, -1.0, 1, token)] for index, token in enumerate(tokens)]
    assert b"".join(tokens).decode() == "naïve 🙂!"
    whole = completion_logprobs(rows, 10)
    assert whole is not None
    assert whole.text_offset == [10, 12, 12, 13, 16, 16, 17]


def test_lists_of_no_runs_and_of_several() -> None:
    assert b"".join(as_list()) == b"[]"
    assert b"".join(as_list([], in_runs([], str))) == b"[]"
    assert json.loads(b"".join(as_list([run([1, 2])], [], in_runs(range(1000), str)))) == [1, 2, *map(str, range(1000))]


class Reader:
    """The other end: it takes so many messages, and then no more."""

    def __init__(self, num_taken: int = 2**31) -> None:
        self.sent: list[Message] = []
        self._num_taken = num_taken

    async def receive(self) -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def send(self, message: Message) -> None:
        if len(self.sent) >= self._num_taken:
            await asyncio.sleep(60)
        self.sent.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join([message.get("body", b"") for message in self.sent])


def many_rows() -> tuple[bytes, Later, Rows]:
    rows = random_rows(3000, 20)
    later: Later = []
    return msgspec.json.encode({"logprobs": later_chat_logprobs(rows, later)}), later, rows


async def test_nobody_waits_for_all_of_it() -> None:
    text, later, rows = many_rows()
    reader, num_turns = Reader(), 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await json_answer(text, later)({"state": {}}, reader.receive, reader.send)
    counting.cancel()
    assert json.loads(reader.body) == {"logprobs": at_once(chat_logprobs(rows))}
    assert num_turns > len(reader.body) / 2**16 > 20
    assert max(len(message.get("body", b"")) for message in reader.sent) <= 2**16


async def test_short_ones_go_at_once_and_the_length_is_told_where_it_is_known() -> None:
    later: Later = []
    text = msgspec.json.encode({"x": later_chat_logprobs(random_rows(20), later)})
    assert isinstance(json_answer(text, later), Response)
    assert isinstance(json_answer(b"{}"), Response)
    reader = Reader()
    answer = json_answer(long := b'"%b"' % (b"x" * 10**6))
    assert isinstance(answer, Stream)
    await answer({"state": {}}, reader.receive, reader.send)
    assert reader.body == long
    assert reader.headers[b"content-length"] == b"1000002"
    assert reader.headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize("num_taken", [1, 2, 10])
async def test_one_that_does_not_take_it_is_given_up(num_taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_presence, "_STALLED_SECONDS", 0.05)
    for answer in (json_answer(*many_rows()[:2]), json_answer(b'"%b"' % (b"x" * 2**20))):
        reader = Reader(num_taken)
        with pytest.raises(ClientGone):
            await asyncio.wait_for(answer({"state": {}}, reader.receive, reader.send), 10)


async def test_the_end_waits_until_all_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits before it takes more, not after: who has not taken what is last is seen as well."""
    monkeypatch.setattr(http_presence, "_STALLED_SECONDS", 0.05)
    text = b'"%b"' % (b"x" * 3 * 2**16)
    reader = Reader(1 + 4)
    with pytest.raises(ClientGone):
        await asyncio.wait_for(json_answer(text)({"state": {}}, reader.receive, reader.send), 10)
    assert reader.body == text


async def test_over_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads has it all; of who does not, nothing is left."""
    monkeypatch.setattr(http_presence, "_STALLED_SECONDS", 0.1)
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    text = b'"%b"' % (b"x" * 2**24)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await json_answer(text)(scope, receive, send)
        except ClientGone:
            gone.set_result(None)

    with bind(f"127.0.0.1:{free_port()}") as listener:
        server = _Server(_uvicorn_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        host, port = listener.getsockname()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{host}:{port}/", timeout=30)).content == text
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        with socket.create_connection((host, port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(30):
                await gone
                while server.server_state.connections:
                    await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
