"""Requests as nobody should send them, to a real HTTP process: each has its own answer, and no other notices.

The tokenizer process is real as well; the test plays the model.
"""

import asyncio
import codecs
import gzip
import json
import random
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest

from daemon import free_port
from http_process import http_process
from tercet.engine.http_app import make_app
from tercet.engine.http_door import Door
from tercet.engine.http_origins import Origins
from tercet.engine.http_server import bind
from tercet.engine.part_count import MAX_PARTS
from tercet.engine.request_log import RequestLog
from tercet.ipc.step_messages import Ended
from tokenizer_process import USAGE, TokenizerProcess, byte_checkpoint, tokenizer_process


@pytest.fixture(scope="module")
def engine(shared: TokenizerProcess) -> TokenizerProcess:
    return shared


async def test_more_tokens_than_a_message_to_the_engine_holds(engine: TokenizerProcess, url: str) -> None:
    """All requests share the door's connection to the engine, which would end."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        beside = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "hi"}))
        submit = await asyncio.to_thread(engine.next_submit)
        many = b'{"tokens": [' + b"1," * 6_000_000 + b"1]}"
        refused = await client.post("/detokenize", content=many)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
        assert "want at most" in refused.json()["error"]["message"]
        engine.sample(submit.number, "fine", Ended(submit.number, "length", None, USAGE))
        assert (await beside).json()["choices"][0]["text"] == "fine"


def test_more_answers_than_the_engine_ever_holds(engine: TokenizerProcess) -> None:
    """Each prompt would be taken, and the last ones refused, however often the client comes back."""
    with http_process(engine, max_num_seqs=2, max_queued_requests=3) as url:
        for prompts, n in (["x"] * 6, 1), (["x"] * 2, 3):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompts, "n": n})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
            assert "want at most 5 answers in all: --max-num-seqs" in answer.json()["error"]["message"]


def exchange(url: str, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the one answer to these bytes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(sent)
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"what?\r\n\r\n", 400, "invalid_http"),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, 431, "headers_too_large"),
    ],
)
def test_what_is_no_request(url: str, sent: bytes, status: int, code: str) -> None:
    told, body = exchange(url, sent)
    assert (told, json.loads(body)["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("evil.example.", 403),
        ("1.2.3.4.example", 403),
        ("10.0.0.1:8000", 200),
        ("[fe80::1]:8000", 200),
        ("localhost:9", 200),
        ("LOCALHOST.", 200),
        ("engine:8000", 200),
        ("chat.localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("", 200),
    ],
)
@pytest.mark.parametrize("path", ["/", "/v1/models"])
def test_a_door_without_a_key_is_for_no_domain(url: str, path: str, host: str, status: int) -> None:
    """A page elsewhere may have its name lead here, and would then be of one origin with the door."""
    answer = httpx.get(url + path, headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["type"] == "permission_error"
        assert f"Host is {host!r}; want" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
def test_an_offer_of_another_protocol(url: str, name: bytes) -> None:
    """As Java's client makes it. It is passed over, and not the body."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\n" + name + b": h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    body = b'{"prompt": "\r\nUpgrade: x"}'.replace(b"\r\n", b"\\r\\n")
    asked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (offer, len(body), body)
    last = asked.replace(b"Upgrade, HTTP2-Settings", b"close", 1)
    status, answers = exchange(url, asked + last)
    assert status == 200
    assert answers.count(b'"count":12') == 2


def test_a_body_that_begins_with_a_byte_order_mark(url: str) -> None:
    """As what Windows' tools write to a file."""
    answer = httpx.post(f"{url}/tokenize", content='{"prompt": "\ufeffx"}'.encode("utf-8-sig"))
    assert (answer.status_code, answer.json().get("count")) == (200, 4), answer.text
    twice = httpx.post(f"{url}/tokenize", content=codecs.BOM_UTF8 * 2 + b'{"prompt": "x"}')
    assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br, gzip"])
def test_a_body_that_is_packed(url: str, encoding: str) -> None:
    """Also one that takes more than one piece, behind which the connection goes on."""
    with httpx.Client(base_url=url) as client:
        for body in (b'{"prompt": "x"}', random.Random(1).randbytes(500_000)):
            headers = {"content-encoding": encoding}
            refused = client.post("/tokenize", content=gzip.compress(body), headers=headers)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (415, "unsupported_encoding")
            assert error["message"].startswith(f"Content-Encoding is {encoding!r}; want the body as it is")
            plain = client.post("/tokenize", content=b'{"prompt": "x"}', headers={"content-encoding": "Identity"})
            assert plain.status_code == 200


def test_the_log_has_no_room_for_everything(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hi", "user": "x" * 513})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "user")


def called_with(arguments: str) -> dict[str, Any]:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    return {"messages": turns}


def shaped_by(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": [{"role": "user", "content": "x"}], "response_format": form}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (called_with('{"x":123456789012345678901234567890}'), "more than 64 bits"),
        (shaped_by({"properties": {"x": {"type": "integer", "maximum": 2**70}}}), "more than 64 bits"),
        (called_with('{"x":"\\ud83d"}'), "half of a character, '\\ud83d'"),
        (called_with('{"\\ud83d":1}'), "half of a character, '\\ud83d'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_no_message_to_the_engine_can_hold(url: str, body: dict[str, Any], words: str, stream: bool) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": stream})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_nested_as_deep_as_can_be_read_and_deeper(url: str, path: str) -> None:
    with httpx.Client(base_url=url) as client:
        for depth in (*range(130, 900, 110), *range(940, 1000)):
            inside = "[" * depth + "]" * depth
            tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "here"}}}]
            tooled = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": tools})
            called = json.dumps(called_with('{"x":here}')).replace("here", inside)
            for body in (tooled.replace('"here"', inside), called):
                answer = client.post(path, content=body)
                assert answer.status_code == 400, (depth, answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("inside", ["[]", "{}", "[{}]"])
def test_more_parts_than_are_read(url: str, path: str, inside: str) -> None:
    body = '{"model":[' + ",".join([inside] * (MAX_PARTS + 1)) + "]}"
    answer = httpx.post(url + path, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert f"more than {MAX_PARTS} lists and objects" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_more_turns_than_a_conversation_has(url: str, path: str) -> None:
    answer = httpx.post(url + path, json={"messages": [{"role": "user", "content": "x"}] * 10_001})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "has 10001; want at most 10000" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models/tiny", "/tokenize"])
async def test_what_nobody_has_thought_of(path: str) -> None:
    """By both ways: those that the router finds, and those that it need not look for."""
    door = SimpleNamespace(info=SimpleNamespace(version="1"), is_guarded=True, admits=lambda *keys: True)
    door.origins = Origins([])
    door.log, door.metrics, door.unanswered = RequestLog(False), SimpleNamespace(answers=Counter()), set()
    app = make_app(cast("Door", door))  # which lacks what it takes to answer

    async def stated(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {}}, receive, send)

    through = httpx.ASGITransport(stated, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=through, base_url="http://x") as client:
        method = "POST" if path == "/tokenize" else "GET"
        answer = await client.request(method, path, content=b'{"prompt": "x"}', headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == ("server_error", "internal_error")
    assert list(door.metrics.answers.elements()) == [(path.replace("/tiny", "/{model:path}"), 500)]
    failing = httpx.ASGITransport(stated)
    async with httpx.AsyncClient(transport=failing, base_url="http://x") as client:
        with pytest.raises(AttributeError):  # for the server to write down
            await client.request(method, path, content=b'{"prompt": "x"}')


def test_somebody_else_listens_before_we_do(engine: TokenizerProcess) -> None:
    """Two engines that start at the same time may both bind an address."""
    port = free_port()
    with (
        bind(f"127.0.0.1:{port}") as other,
        pytest.raises(AssertionError) as ended,
        http_process(engine, port=port, loaded=other.listen),
    ):
        pass
    assert f"--http 127.0.0.1:{port}: Address already in use" in str(ended.value)
    assert "Serving" not in str(ended.value)


async def test_a_slash_behind_a_path(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, follow_redirects=True) as client:
        for path in ("/v1/models", "/health", "/version"):
            with_slash, without = await client.get(f"{path}/"), await client.get(path)
            assert (with_slash.status_code, with_slash.json()) == (200, without.json())


async def test_without_a_template_a_conversation_is_no_prompt(tmp_path: Path) -> None:
    turns = {"messages": [{"role": "user", "content": "hi"}]}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": turns,
        "/v1/messages": {**turns, "max_tokens": 9},
        "/v1/responses": {"input": "hi"},
        "/tokenize": turns,
    }
    with tokenizer_process(byte_checkpoint(tmp_path, None)) as engine, http_process(engine) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            for path, body in asked.items():
                error, field = (await client.post(path, json=body)).json()["error"], next(iter(body))
                wanted = "want a text or token ids: this checkpoint has no chat template"
                assert error["message"] == f"{field} is a conversation; {wanted}"
                assert error.get("param", field) == field
