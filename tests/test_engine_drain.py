"""An engine that is told to end while a process is away, or loses one on its way: what it has begun, it finishes."""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon import Daemon, free_port
from engine_children import children
from tercet.ipc.client import Client, Overloaded
from tercet.ipc.messages import SamplingParams

_ANSWER = SamplingParams(max_tokens=600, ignore_eos=True)
Act = Callable[[Daemon], None]


def _stop(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGTERM)


def _kill_tokenizer(daemon: Daemon) -> None:
    (tokenizer,) = children(daemon.process.pid, "tokenizer")
    tokenizer.kill()
    tokenizer.wait(10)


@pytest.mark.parametrize("acts", [(_kill_tokenizer, _stop), (_stop, _kill_tokenizer)], ids=["away", "on the way"])
async def test_the_tokenizer_dies(ids_only_model: Path, tmp_path: Path, acts: tuple[Act, Act]) -> None:
    flags = ("--load-format", "null", "--null-step-ms", "5", "--listen", f"ipc://{tmp_path}/engine")
    with Daemon(str(ids_only_model), *flags) as daemon:
        async with Client(daemon.address) as client:

            async def answer(begun: asyncio.Event) -> int:
                count = 0
                async for piece in client.stream([1, 2, 3], _ANSWER):
                    count += len(piece.token_ids)
                    begun.set()
                return count

            beginnings = [asyncio.Event() for _ in range(4)]
            answers = [asyncio.create_task(answer(begun)) for begun in beginnings]
            for begun in beginnings:
                await asyncio.wait_for(begun.wait(), 20)
            for act in acts:
                await asyncio.to_thread(act, daemon)
                await asyncio.sleep(0.1)
            assert await asyncio.wait_for(asyncio.gather(*answers), 30) == [600] * 4
        assert await asyncio.to_thread(daemon.process.wait, 20) == 0


async def test_the_http_door_dies(ids_only_model: Path, tmp_path: Path) -> None:
    """Its successor knows that nothing new is taken."""
    address = f"127.0.0.1:{free_port()}"
    flags = ("--load-format", "null", "--null-step-ms", "5", "--listen", f"ipc://{tmp_path}/engine", "--http", address)
    with Daemon(str(ids_only_model), *flags) as daemon:
        async with Client(daemon.address) as client:
            stream = client.stream([1, 2, 3], SamplingParams(max_tokens=7000, ignore_eos=True))
            await anext(aiter(stream))
            _stop(daemon)
            with pytest.raises(Overloaded, match="shutting down"):
                for _ in range(100):
                    await client.generate([1], SamplingParams(max_tokens=1))
            (door,) = children(daemon.process.pid, "http")
            door.kill()
            door.wait(10)
            assert await asyncio.to_thread(_readiness, address) == (503, "the engine is shutting down")
            _stop(daemon)


def _readiness(address: str) -> tuple[int, str]:
    """What the door says, once there is one."""
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"http://{address}/health/ready", timeout=10) as response:
                return response.status, ""
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]["message"]
        except OSError:
            time.sleep(0.1)
    raise AssertionError("no door has come back")
