"""What tests of the tokenizer process and of its clients begin with; conftest.py hands it to all files."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from http_process import http_process
from tercet.ipc.client import Client
from tokenizer_process import TokenizerProcess, byte_checkpoint, tokenizer_process
from wire_peer import Peer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the process reads; nobody writes there."""
    return byte_checkpoint(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[TokenizerProcess]:
    """For tests that leave it as they found it."""
    with tokenizer_process(folder) as process:
        yield process


@pytest.fixture(scope="module")
def url(engine: TokenizerProcess) -> Iterator[str]:
    """Of an HTTP process, where a module has an engine of its own for all its tests."""
    with http_process(engine) as url:
        yield url


@pytest.fixture
def peer(shared: TokenizerProcess, context: zmq.Context[zmq.Socket[bytes]]) -> Peer:
    return Peer(context, shared.address)


@pytest.fixture
def engine(folder: Path) -> Iterator[TokenizerProcess]:
    with tokenizer_process(folder) as process:
        yield process


@pytest.fixture
async def client(engine: TokenizerProcess) -> AsyncIterator[Client]:
    async with Client(engine.address) as client:
        yield client
