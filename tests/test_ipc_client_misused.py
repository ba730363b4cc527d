"""The async client in programs that open it twice, ask it in another event loop, or never close it."""

import asyncio
import subprocess
import sys

import pytest

from played_scheduler import ended, submitted
from tercet.ipc.client import Client
from tokenizer_process import TokenizerProcess

FORGETFUL = """
import asyncio, gc, sys
from tercet.ipc.client import Client

async def forget():
    await Client(sys.argv[1]).__aenter__()

asyncio.run(forget())
gc.collect()
print("collected")
"""


async def test_two_tasks_that_open_it(engine: TokenizerProcess) -> None:
    client = Client(engine.address)
    async with client:
        with pytest.raises(RuntimeError, match="this client is open already"):
            async with client:
                pass
        running = asyncio.ensure_future(client.generate("x"))  # whoever was first notices nothing
        submit = await submitted(engine)
        engine.sample(submit.number, "on", ended(submit))
        assert (await running).text == "on"
    async with client:
        assert (await client.info()).vocab_size


async def test_another_event_loop(client: Client) -> None:
    for ask in (
        client.info,
        lambda: client.generate("x"),
        lambda: client.tokenize("x"),
        lambda: anext(client.stream("x")),
    ):
        with pytest.raises(RuntimeError, match="opened in another event loop"):
            await asyncio.to_thread(lambda ask=ask: asyncio.run(asyncio.wait_for(ask(), 10)))
    assert await client.tokenize("x")


def test_a_client_that_nobody_closes_is_garbage_like_any_other(engine: TokenizerProcess) -> None:
    command = [sys.executable, "-c", FORGETFUL, engine.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "collected\n"
