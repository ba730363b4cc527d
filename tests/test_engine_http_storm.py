"""Hundreds of streams at once, half of them cut off at random: the others are whole, and nothing is left behind."""

import asyncio
import json
import random

import psutil
import pytest

from checkpoints import checkpoint
from daemon import Daemon, free_port
from engine_children import children
from tercet.ipc.answers import EngineInfo
from tercet.ipc.client import Client

NUM_STREAMS = 500
NUM_TOKENS = 24


async def stream(http: str, number: int, cut_after: int | None) -> str | None:
    """The text of a whole answer; None if this client left after so many events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(http.rpartition(":")[2]))
    body = json.dumps(
        {
            "prompt": f"number {number % 7}",
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    text, num_events = "", 0
    try:
        async for line in reader:
            if cut_after == num_events:
                return None
            if line.startswith(b"data: {"):
                num_events += 1
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            if line.startswith(b"data: [DONE]"):
                return text
        raise AssertionError("the stream ended without [DONE]")
    finally:
        writer.transport.abort()


async def settled(daemon: Daemon, num_free_pages: int, door: psutil.Process, num_fds: int) -> EngineInfo:
    async with Client(daemon.address) as client:
        for _ in range(200):
            info = await client.info()
            if not info.num_running + info.num_waiting and info.num_free_pages == num_free_pages:  # noqa: SIM102
                if door.num_fds() <= num_fds:
                    return info
            await asyncio.sleep(0.1)
    raise AssertionError(f"something is left: {info}, {door.num_fds()} files, at first {num_free_pages} and {num_fds}")


@pytest.mark.long  # a few such are in test_chaos.py
async def test_streams_cut_off_at_random_leave_nothing() -> None:
    rng = random.Random()
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--no-log-requests", "--max-num-seqs", "64"]
    with Daemon(str(checkpoint("llama")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        (door,) = children(daemon.process.pid, "http")
        alone = [await stream(daemon.http, number, None) for number in range(7)]
        await asyncio.sleep(0.5)
        async with Client(daemon.address) as client:
            num_free_pages = (await client.info()).num_free_pages
        num_fds = door.num_fds()
        cuts = [rng.choice([None, rng.randrange(NUM_TOKENS)]) for _ in range(NUM_STREAMS)]
        answers = await asyncio.gather(*(stream(daemon.http, i, cut) for i, cut in enumerate(cuts)))
        for number, (cut, answer) in enumerate(zip(cuts, answers, strict=True)):
            if cut is None:
                assert answer == alone[number % 7]
        assert None in answers
        await settled(daemon, num_free_pages, door, num_fds)
