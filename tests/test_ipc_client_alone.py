"""The async client where no engine answers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from played_scheduler import submitted
from tercet.ipc.client import (
    Client,
    EngineDied,
)
from tercet.ipc.lifeline import Lifeline
from tokenizer_process import TokenizerProcess

LATER = ["tiny", "9.8.7", 512, 257, 0, 0, 99, 100, 0, 0, 0, 0, "none", "none", []]


@asynccontextmanager
async def engine_that_says(address: str, answer: bytes) -> AsyncIterator[None]:
    """To whatever comes."""

    async def serve() -> None:
        while True:
            client, _ = await socket.recv_multipart()
            await socket.send_multipart((client, answer))

    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER, socket_class=zmq.asyncio.Socket) as socket:
        socket.linger = 0
        socket.bind(address)
        serving = asyncio.ensure_future(serve())
        yield
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_nobody_there(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(EngineDied, match=r"nothing answers at ipc://.* within 0\.3 s"):
        async with Client(f"ipc://{tmp_path}/nobody", connect_timeout=0.3):
            pass
    assert time.monotonic() - began < 3
    with pytest.raises(ValueError, match="want ipc://PATH or tcp://HOST:PORT"):
        async with Client("nonsense"):
            pass


async def test_somebody_who_accepts_and_says_nothing(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mute = context.socket(zmq.ROUTER)
    mute.bind(f"ipc://{tmp_path}/mute")
    with pytest.raises(EngineDied, match="nothing answers"):
        async with Client(f"ipc://{tmp_path}/mute", connect_timeout=0.3):
            pass
    context.destroy(linger=0)


async def test_somebody_who_accepts_and_hangs_up() -> None:
    """As a door that wants another key, or a proxy with nobody behind it."""

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    renewals: list[bool] = []
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        line = Lifeline(f"tcp://127.0.0.1:{port}", None, lambda message: None, renewals.append)
        assert not await line.is_up(within=1.2)
        await line.close()
    assert 0 < len(renewals) < 6, "it asks again at once, and at once again"
    assert not any(renewals), "nobody can have read what was asked"


@pytest.mark.parametrize(
    "info", [LATER, [*LATER, "news"], ["tiny", "9.8.7", {"limits": [512, 257]}]], ids=["same", "longer", "other"]
)
async def test_an_engine_of_another_version(address: str, info: list[Any]) -> None:
    """It is told at once, whether or not what it says could be read."""
    async with engine_that_says(address, msgpack.packb(["EngineInfo", *info])):
        with pytest.raises(EngineDied, match=rf"is tercet 9\.8\.7 and this client tercet {metadata.version('tercet')}"):
            async with asyncio.timeout(30), Client(address, connect_timeout=600):
                pass


async def test_a_later_release_of_the_same_version(address: str) -> None:
    ours = [*metadata.version("tercet").split(".")[:2], "999"]
    info = msgpack.packb(["EngineInfo", "tiny", ".".join(ours), *LATER[2:]])
    async with engine_that_says(address, info), Client(address) as client:
        assert (await client.info()).model == "tiny"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400", msgpack.packb(["Greetings"]), b"\xa1\xff"])
async def test_somebody_who_is_no_engine(address: str, answer: bytes) -> None:
    async with engine_that_says(address, answer):
        with pytest.raises(EngineDied, match="cannot read"):
            async with asyncio.timeout(30), Client(address, connect_timeout=600):
                pass


async def test_a_successor_of_another_version(engine: TokenizerProcess) -> None:
    async with Client(engine.address) as client:
        waiting = asyncio.ensure_future(client.generate("x"))
        await submitted(engine)
        engine.process.kill()
        engine.process.wait()
        Path(engine.address.removeprefix("ipc://")).unlink()
        async with engine_that_says(engine.address, msgpack.packb(["EngineInfo", *LATER, "news"])):
            with pytest.raises(EngineDied, match=r"tercet 9\.8\.7"):
                await asyncio.wait_for(waiting, 30)
            with pytest.raises(EngineDied, match=r"tercet 9\.8\.7"):
                await client.generate("y")
