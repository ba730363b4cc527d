"""The async client where no engine answers."""

import time
from pathlib import Path

import pytest
import zmq

from tercet.ipc.client import (
    Client,
    EngineDied,
)


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
