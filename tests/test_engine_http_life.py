"""The HTTP door when something ends: the engine drains, a process dies, the address is taken."""

import asyncio
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, InternalServerError, OpenAI

from checkpoints import checkpoint
from daemon import Daemon, free_port
from engine_children import children
from http_process import http_process
from tercet.engine.http_server import bind
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from tercet.ipc.step_messages import Unservable
from test_scripts_serve import serve
from tokenizer_process import byte_checkpoint, tokenizer_process

FLAGS = ("--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny")
LONG = {"model": "tiny", "prompt": "the cat", "max_tokens": 320, "temperature": 0, "extra_body": {"ignore_eos": True}}


def open_door(*flags: str) -> Daemon:
    return Daemon(str(checkpoint("llama")), *FLAGS, "--http", f"127.0.0.1:{free_port()}", *flags)


async def read(client: AsyncOpenAI, begun: asyncio.Event) -> str:
    text = ""
    async for chunk in await client.completions.create(stream=True, **LONG):  # type: ignore[call-overload]
        begun.set()
        text += chunk.choices[0].text
    return text


async def ready(http: str, wanted: int) -> httpx.Response:
    """The readiness once it is so."""
    deadline = time.monotonic() + 30
    while True:
        try:
            answer = httpx.get(f"{http}/health/ready")
            if answer.status_code == wanted:
                return answer
        except httpx.TransportError:
            assert wanted == 200, "the door is shut"
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_death_is_a_pause_and_draining_lets_finish() -> None:
    with open_door() as daemon:
        base = {"base_url": f"{daemon.http}/v1", "api_key": "none", "timeout": 60.0, "max_retries": 0}
        async with AsyncOpenAI(**base) as client:  # type: ignore[arg-type]
            undisturbed = await read(client, asyncio.Event())
            for role in ("worker", "tokenizer"):
                begun = asyncio.Event()
                reading = asyncio.ensure_future(read(client, begun))
                await begun.wait()
                (process,) = children(daemon.process.pid, role)
                process.send_signal(signal.SIGKILL)
                answer = await ready(daemon.http, 503)
                assert role in answer.json()["error"]["message"]
                assert httpx.get(f"{daemon.http}/health").status_code == 200
                assert await reading == undisturbed
                await ready(daemon.http, 200)

            (door,) = children(daemon.process.pid, "http")
            door.send_signal(signal.SIGKILL)
            door.wait(10)
            await ready(daemon.http, 200)
        async with AsyncOpenAI(**base) as client:  # type: ignore[arg-type]
            beginnings = [asyncio.Event() for _ in range(4)]
            readings = [asyncio.ensure_future(read(client, begun)) for begun in beginnings]
            for begun in beginnings:
                await begun.wait()
            daemon.process.send_signal(signal.SIGTERM)
            await ready(daemon.http, 503)
            refused = httpx.post(f"{daemon.http}/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "draining"
            assert await asyncio.gather(*readings) == [undisturbed] * 4
            assert await asyncio.to_thread(daemon.process.wait, 20) == 0


@pytest.mark.long
async def test_a_drain_right_behind_a_tokenizer_s_death_takes_no_newcomer() -> None:
    """Its successor waits for the streams of the dead one; who asks by HTTP has none."""
    with open_door() as daemon:
        async with AsyncOpenAI(base_url=f"{daemon.http}/v1", api_key="none", timeout=60.0, max_retries=0) as client:
            undisturbed, begun = await read(client, asyncio.Event()), asyncio.Event()
            reading = asyncio.ensure_future(read(client, begun))
            await begun.wait()
            (tokenizer,) = children(daemon.process.pid, "tokenizer")
            tokenizer.send_signal(signal.SIGKILL)
            await ready(daemon.http, 503)
            await ready(daemon.http, 200)
            daemon.process.send_signal(signal.SIGTERM)
            while "shutting down" not in (await ready(daemon.http, 503)).json()["error"]["message"]:
                await asyncio.sleep(0.01)
            refused = httpx.post(f"{daemon.http}/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "draining"
            assert await reading == undisturbed
            assert await asyncio.to_thread(daemon.process.wait, 20) == 0


def test_a_full_engine_says_when_to_ask_again() -> None:
    slow = "--load-format", "null", "--null-step-ms", "50"
    with open_door(*slow, "--max-num-seqs", "1", "--max-queued-requests", "1") as daemon:
        url, body = f"{daemon.http}/v1/completions", {"prompt": [5], "max_tokens": 480, "return_token_ids": True}
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60.0) as running:
            next(running.iter_lines())
            refused = httpx.post(url, json={**body, "prompt": [[5], [6]]}, timeout=60.0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_a_key_is_needed_beyond_loopback(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done = serve("x", "--http", "0.0.0.0:8000")
    assert done.returncode == 2
    assert "want a loopback address, as in 127.0.0.1:8000, or an --api-key" in done.stderr
    monkeypatch.setenv("TERCET_API_KEY", "open-sesame")
    with open_door() as daemon:
        assert httpx.get(f"{daemon.http}/version").status_code == 401
        key = {"authorization": "Bearer open-sesame"}
        assert httpx.get(f"{daemon.http}/version", headers=key).is_success
        assert httpx.get(f"{daemon.http}/version", headers={**key, "host": "model.example"}).is_success
    assert "open-sesame" not in capfd.readouterr().err


@pytest.mark.parametrize("http", ["[::1]", "::1"])
async def test_addresses_of_ipv6(http: str, ids_only_model: Path) -> None:
    """What the ready line says can be used as it stands."""
    listen, port = f"tcp://[::1]:{free_port()}", free_port()
    doors = ("--listen", listen, "--http", f"{http}:{port}")
    with Daemon(str(ids_only_model), *FLAGS, "--load-format", "null", *doors) as daemon:
        assert (daemon.address, daemon.http) == (listen, f"http://[::1]:{port}")
        async with Client(daemon.address) as client:
            answer = await client.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
            assert len(answer.token_ids) == 2
        assert httpx.get(f"{daemon.http}/health/ready").is_success


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--http", "8000"], "--http got '8000'; want HOST:PORT"),
        (["--http", "127.0.0.1:0"], "want HOST:PORT"),
        (["--http", "127.0.0.1:80000"], "want HOST:PORT"),
        (["--http", "127.0.0.1:8000", "--api-key", "short"], "a key of 5 characters; want 8 to 512"),
        (["--api-key", "long-enough"], "there is none; want --http"),
    ],
)
def test_wrong_flags(arguments: list[str], words: str) -> None:
    done = serve("x", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_an_address_in_use_is_known_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = serve(str(checkpoint("llama")), *FLAGS, "--http", address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == f"tercet: http: --http {address}: Address already in use"


async def test_a_log_that_cannot_be_written_ends_nothing(ids_only_model: Path) -> None:
    """The disk is full, while requests are logged and a process that dies is replaced."""
    with open("/dev/full", "w") as full:
        flags = [*FLAGS, "--load-format", "null", "--max-model-len", "100"]
        daemon = Daemon(str(ids_only_model), *flags, "--http", f"127.0.0.1:{free_port()}", log=full)
    with daemon, httpx.Client(base_url=daemon.http, timeout=30) as client:
        for role in ("scheduler", None):
            for _ in range(2):
                assert client.post("/v1/completions", json={"prompt": [1, 2, 3]}).is_success
            if role is not None:
                (process,) = children(daemon.process.pid, role)
                process.send_signal(signal.SIGKILL)
                await ready(daemon.http, 503)


async def test_what_is_written_is_sent_at_once() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Door(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connection = transport.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    port = free_port()
    server = await asyncio.get_running_loop().create_server(Door, sock=bind(f"127.0.0.1:{port}"))
    async with server:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        assert await accepted == 1


def test_what_kills_workers_is_not_asked_for_again_by_openais_client(tmp_path: Path) -> None:
    """It asks again by itself, twice, after nearly every error of a server."""
    with tokenizer_process(byte_checkpoint(tmp_path)) as engine, http_process(engine) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30.0)
        assert client.max_retries > 0
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.completions.create, model="tiny", prompt="x")
            engine.send(Unservable(engine.next_submit().number, "kills_workers", "died twice"))
            with pytest.raises(InternalServerError, match="died twice") as refused:
                asked.result(timeout=30)
        assert (refused.value.status_code, refused.value.code) == (500, "kills_workers")
        assert not engine.has_message()
