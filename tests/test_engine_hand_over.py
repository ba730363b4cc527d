"""A drained engine whose HTTP clients have not taken all of their answers: its door waits for them, and nobody else."""

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from checkpoints import checkpoint
from covering import long
from daemon import Daemon, free_port
from engine_children import children, is_alive
from null_daemon import eventually
from tercet.engine.http_server import bind

_NUM_ANSWERS, _NUM_TOKENS = 16, 480
_MUCH = json.dumps(
    {
        "prompt": "the cat",
        "temperature": 0,
        "n": _NUM_ANSWERS,
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
        "return_token_ids": True,
    }
).encode()
"""Far more than sockets keep between them."""
_QUESTION = b'{"prompt": "the cat"}'
Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A daemon with these flags; its log is in `tmp_path`."""
    with (tmp_path / "log").open("w") as log:

        def daemon(*flags: str) -> Daemon:
            address = f"127.0.0.1:{free_port()}"
            settings = ("--device", "cpu", "--kv-cache-memory", "8MiB", "--http", address)
            return Daemon(str(checkpoint("llama")), *settings, *flags, log=log)

        yield daemon


def connect(daemon: Daemon) -> socket.socket:
    """As one who reads little at a time."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", int(daemon.http.rpartition(":")[2])))
    return connection


def asked(path: str, body: bytes, length: int | None = None) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length or len(body)}\r\n\r\n".encode() + body


def ask(daemon: Daemon, behind: bytes = b"") -> socket.socket:
    """For much, whose answer has begun."""
    connection = connect(daemon)
    connection.sendall(asked("/v1/completions", _MUCH) + behind)
    assert connection.recv(1) == b"H"
    return connection


def drain(daemon: Daemon) -> psutil.Process:
    """Once all but the HTTP door have ended: the door."""
    (door,) = children(daemon.process.pid, "http")
    daemon.process.send_signal(signal.SIGTERM)
    others = ("tokenizer", "scheduler", "worker")
    eventually(lambda: not any(children(daemon.process.pid, name) for name in others), "they have not ended", 60)
    return door


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(2**20), b""))


@pytest.mark.long
def test_who_reads_slowly_gets_all(start: Start) -> None:
    """Who says nothing, or has not said all, is not waited for."""
    with start() as daemon:
        idle, half = httpx.Client(base_url=daemon.http), connect(daemon)
        assert idle.get("/health").is_success
        half.sendall(asked("/v1/completions", b"{", 100))
        slow = ask(daemon, behind=asked("/tokenize", _QUESTION))
        door = drain(daemon)
        refusal = read_all(half)
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"draining"' in refusal
        with pytest.raises(httpx.TransportError):
            idle.get("/health")
        time.sleep(1.5)
        with bind(daemon.http.removeprefix("http://")) as successor:
            successor.listen()
        assert is_alive(door)
        answer, refusal = re.split(rb"TTP/1.1 (?=503)", read_all(slow))
        assert daemon.process.wait(10) == 0
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\nH")
    assert b"connection: close" in refusal
    said = re.findall(rb'"index":(\d+).*?"token_ids":\[([\d,]*)\]', answer)
    for index in range(_NUM_ANSWERS):
        token_ids = [int(one) for place, some in said if int(place) == index for one in some.split(b",")]
        assert len(token_ids) == _NUM_TOKENS


@pytest.mark.long
def test_who_never_reads_is_cut_at_the_deadline(start: Start, tmp_path: Path) -> None:
    with start("--drain-timeout", "3") as daemon:
        processes = psutil.Process(daemon.process.pid).children(recursive=True)
        connections = [ask(daemon) for _ in range(2)]
        with httpx.Client(base_url=daemon.http) as client:
            while not re.search(r"num_requests_running\{[^}]*\} 0\b", client.get("/metrics").text):
                time.sleep(0.1)
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0
        assert 2.9 < time.monotonic() - began < 5
        assert not any(map(is_alive, processes))
        assert not any(b"[DONE]" in read_all(connection) for connection in connections), "it had room for all"
    said = (tmp_path / "log").read_text()
    assert "[http] Cancel 2 running task(s)" in said
    assert "Traceback" not in said


@pytest.mark.long
def test_a_second_signal_ends_at_once(start: Start) -> None:
    with start() as daemon, ask(daemon):
        door = drain(daemon)
        time.sleep(1.5)
        assert daemon.process.poll() is None
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(2) == 0
        assert not is_alive(door)


@pytest.mark.parametrize(
    ("number", "words"), [long(signal.SIGKILL, "was killed by SIGKILL"), long(signal.SIGSTOP, "hung")]
)
def test_a_door_that_dies_is_not_replaced(start: Start, tmp_path: Path, number: signal.Signals, words: str) -> None:
    with start("--heartbeat-timeout", "2") as daemon, ask(daemon):
        door = drain(daemon)
        door.send_signal(number)
        assert daemon.process.wait(10) == 0
    said = (tmp_path / "log").read_text()
    assert re.search(rf"^tercet: http:? {words}", said, re.MULTILINE), said
    assert "starting it again" not in said


@pytest.mark.long
async def test_an_answer_that_tells_of_its_prompt_is_whole(start: Start) -> None:
    """What the door needs the tokenizer for, it has asked before that ends."""
    asked_for = {"prompt": "the cat", "echo": True, "n": 16, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with start("--max-lease", "1") as daemon:
        async with httpx.AsyncClient(base_url=daemon.http, timeout=60) as client:
            undisturbed = (await client.post("/v1/completions", json=asked_for)).json()["choices"][0]["text"]
            answering = asyncio.ensure_future(client.post("/v1/completions", json=asked_for))
            while not re.search(r"num_requests_running\{[^}]*\} 16\b", (await client.get("/metrics")).text):
                assert not answering.done()
                await asyncio.sleep(0.01)
            daemon.process.send_signal(signal.SIGTERM)
            answer = await answering
        assert answer.is_success, answer.text
        assert answer.json()["choices"][0]["text"] == undisturbed
        assert undisturbed.startswith("the cat")
        assert daemon.process.wait(10) == 0
