"""Requests as nobody should send them, to a real HTTP process: each has its own answer, and no other notices.

The tokenizer process is real as well; the test plays the model.
"""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from daemon import free_port
from http_process import http_process
from tercet.engine.http_server import bind
from tercet.ipc.step_messages import Ended
from tokenizer_process import USAGE, TokenizerProcess, byte_checkpoint, tokenizer_process


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    with tokenizer_process(byte_checkpoint(tmp_path_factory.mktemp("odd"))) as process:
        yield process


@pytest.fixture(scope="module")
def url(engine: TokenizerProcess) -> Iterator[str]:
    with http_process(engine) as url:
        yield url


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


def test_the_log_has_no_room_for_everything(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hi", "user": "x" * 513})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "user")


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
