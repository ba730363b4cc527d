"""What comes behind a request on its connection, to a real HTTP process: the next request waits for its turn.

The tokenizer process is real as well; the test plays the model.
"""

import asyncio
import json
import socket
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send

from daemon import free_port
from tercet.engine import http_connection
from tercet.engine.http_server import _Server, _uvicorn_config, bind
from tercet.ipc.step_messages import Abort, Ended, Submit
from tokenizer_process import USAGE, TokenizerProcess


@pytest.fixture(scope="module")
def engine(shared: TokenizerProcess) -> TokenizerProcess:
    return shared


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def asked(prompt: str, *, stream: bool = False, close: bool = False) -> bytes:
    body = json.dumps({"prompt": prompt, "stream": stream}).encode()
    more = "Connection: close\r\n" if close else ""
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def ask_ahead(
    connection: socket.socket, engine: TokenizerProcess, first: bytes, behind: bytes, *, at_once: bool
) -> Submit:
    """`behind` comes in one piece with `first`, or when that has reached the model."""
    connection.sendall(first + behind if at_once else first)
    submit = engine.next_submit()
    if not at_once:
        connection.sendall(behind)
    return submit


def read_to(connection: socket.socket, mark: bytes) -> bytes:
    """Up to where `mark` has come, or the end."""
    read = b""
    while mark not in read and (more := connection.recv(65536)):
        read += more
    return read


BEHIND = {
    "a request": asked("second"),
    "half a request": asked("second")[:30],
    "an empty line": b"\r\n",
    "no HTTP": b"what?\r\n\r\n",
    "a long request": asked("x" * 300_000),
}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("stream", [True, False])
def test_who_has_asked_ahead_and_leaves_is_missed(
    engine: TokenizerProcess, url: str, behind: str, stream: bool, at_once: bool
) -> None:
    with connect(url) as connection:
        submit = ask_ahead(connection, engine, asked("first", stream=stream), BEHIND[behind], at_once=at_once)
    gone = engine.next_message()
    assert isinstance(gone, Abort)
    assert list(memoryview(gone.numbers).cast("q")) == [submit.number]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("between", [b"", b"\r\n"])
def test_a_request_behind_another_waits_for_its_turn(
    engine: TokenizerProcess, url: str, stream: bool, at_once: bool, between: bytes
) -> None:
    first, behind = asked("first", stream=stream), between + asked("second") + asked("third", close=True)
    with connect(url) as connection:
        submit = ask_ahead(connection, engine, first, behind, at_once=at_once)
        engine.sample(submit.number, "one")
        assert not engine.has_message()
        engine.sample(submit.number, "end", Ended(submit.number, "length", None, USAGE))
        for answer in ("two", "three"):
            later = engine.next_submit()
            engine.sample(later.number, answer, Ended(later.number, "length", None, USAGE))
        read = read_to(connection, b"never")
    answers = read.split(b"HTTP/1.1 ")[1:]
    assert [answer.partition(b" ")[0] for answer in answers] == [b"200"] * 3
    assert (b"data: [DONE]" in answers[0]) is stream
    assert [b'"text":"two"' in answer for answer in answers] == [False, True, False]
    assert [b'"text":"three"' in answer for answer in answers] == [False, False, True]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_no_http_behind_a_request_is_answered_behind_it(
    engine: TokenizerProcess, url: str, at_once: bool
) -> None:
    first, behind = asked("first", stream=True), b"what?\r\n\r\n"
    with connect(url) as connection:
        submit = ask_ahead(connection, engine, first, behind, at_once=at_once)
        engine.sample(submit.number, "one")
        read = read_to(connection, b'"text":"')
        engine.sample(submit.number, "end", Ended(submit.number, "length", None, USAGE))
        read += read_to(connection, b"never")
    _, answer, refusal = read.split(b"HTTP/1.1 ")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert refusal.startswith(b"400 ")
    assert b'"invalid_http"' in refusal


@pytest.mark.parametrize("kept", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_knows_no_chunks_is_sent_none(engine: TokenizerProcess, url: str, stream: bool, kept: str) -> None:
    """HTTP/1.0: what has no length ends with the connection."""
    first, behind = asked("first", stream=stream).replace(b"HTTP/1.1\r\n", f"HTTP/1.0\r\n{kept}".encode()), b""
    with connect(url) as connection:
        submit = ask_ahead(connection, engine, first, behind, at_once=True)
        engine.sample(submit.number, "one")
        begun = read_to(connection, b'"text":"') if stream else b""
        engine.sample(submit.number, "end", Ended(submit.number, "length", None, USAGE))
        head, _, body = (begun + read_to(connection, b"never")).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert (b"content-length: %d" % len(body) in head) is not stream
    if stream:
        *events, done, after = body.split(b"\n\n")
        assert (done, after) == (b"data: [DONE]", b"")
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
        assert "".join(one["choices"][0]["text"] for one in chunks) == "oneend"
    else:
        assert json.loads(body)["choices"][0]["text"] == "oneend"


@pytest.mark.parametrize("behind", [b"\r\n", b"GET / HT"])
async def test_an_answer_may_take_longer_than_headers(monkeypatch: pytest.MonkeyPatch, behind: bytes) -> None:
    """Whatever has come behind its request; and an empty line there begins no other."""
    monkeypatch.setattr(http_connection, "_HEADER_SECONDS", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.3)
        await send({"type": "http.response.body", "body": b"said", "more_body": False})

    port = free_port()
    listener = bind(f"127.0.0.1:{port}")
    listener.listen()
    server = _Server(_uvicorn_config(app))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ask = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(ask)
    assert await reader.readuntil(b"\r\n\r\n")
    writer.write(behind)
    assert await reader.readuntil(b"0\r\n\r\n") == b"4\r\nsaid\r\n0\r\n\r\n"
    if behind == b"\r\n":
        await asyncio.sleep(0.3)
        writer.write(ask)
        assert (await reader.readline()).split()[1] == b"200"
    else:
        assert (await reader.readline()).split()[1] == b"408"
    writer.close()
    server.should_exit = True
    await serving
