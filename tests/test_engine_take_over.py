"""Upgrades without loss: a new engine takes the address of an old one under traffic, as docs/reliability.md says."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from daemon import Daemon
from engine_children import children
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.ipc.client import Client, Overloaded
from tercet.ipc.messages import SamplingParams
from tercet.ipc.process_messages import Progress

LONG = SamplingParams(max_tokens=8000, ignore_eos=True)


def answer(length: int, count: int) -> list[int]:
    """What a null engine says."""
    return [1000 + (length + i) % 500 for i in range(count)]


async def test_a_new_engine_takes_over_under_traffic(ids_only_model: Path, tmp_path: Path) -> None:
    """One long stream is cut by the old engine's deadline; short requests come all the time. Nobody notices."""
    address = f"ipc://{tmp_path}/front"
    config = EngineConfig(
        model=str(ids_only_model),
        load_format="null",
        listen=(address,),
        take_over=True,
        max_lease=1,
        drain_timeout=0.5,
    )
    old = await asyncio.to_thread(EngineProcess, config)
    stopping, num_short = False, 0

    async def ask_short(client: Client, length: int) -> None:
        nonlocal num_short
        while not stopping:
            got = await client.generate([1] * length, SamplingParams(max_tokens=20, ignore_eos=True))
            assert got.token_ids == answer(length, 20)
            num_short += 1

    waiting = asyncio.Event()
    loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:
        if "waiting for the old engine" in progress.what:
            loop.call_soon_threadsafe(waiting.set)

    async with Client(address, successor_timeout=30) as client:
        short = [asyncio.ensure_future(ask_short(client, length)) for length in (1, 7, 30)]
        starting = asyncio.ensure_future(asyncio.to_thread(EngineProcess, config, report))
        await asyncio.wait_for(waiting.wait(), 30)
        long = asyncio.ensure_future(client.generate([1] * 11, LONG))
        await asyncio.sleep(0.1)
        assert old.process.stdin is not None
        os.write(old.process.stdin.fileno(), b"stop\n")  # once: what runs may end
        await asyncio.to_thread(old.process.wait, 20)
        old.close()
        new = await asyncio.wait_for(starting, 10)
        with new:
            before, began = num_short, time.monotonic()
            assert (await asyncio.wait_for(long, 60)).token_ids == answer(11, 8000)
            while num_short < before + 30:
                await asyncio.sleep(0.01)
                assert time.monotonic() - began < 60
            stopping = True
            await asyncio.gather(*short)
            assert len(children(new.process.pid, "tokenizer")) == 1
            assert (tmp_path / "front").exists()


@pytest.mark.long
async def test_nobody_takes_over(ids_only_model: Path, tmp_path: Path) -> None:
    """Then the request fails as it would have, after the time that its client gave."""
    address = f"ipc://{tmp_path}/front"
    with Daemon(str(ids_only_model), "--load-format", "null", "--listen", address, "--max-lease", "1") as daemon:
        async with Client(address, successor_timeout=0.5) as client:
            running = asyncio.ensure_future(client.generate([1], LONG))
            await asyncio.sleep(0.1)
            daemon.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            with pytest.raises(Overloaded, match="shutting down"):
                await client.generate([1], SamplingParams(max_tokens=1))
            assert len((await running).token_ids) == 8000
        assert daemon.process.wait(20) == 0
