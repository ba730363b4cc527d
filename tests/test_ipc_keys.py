"""A door with a key: who has it gets in, by the Python client or by hand; nobody else does."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from unittest.mock import Mock

import msgpack
import pytest
import zmq
import zmq.utils.z85

from daemon import Daemon, free_port
from tercet.engine.config import EngineConfig
from tercet.ipc import lifeline
from tercet.ipc.addresses import check_listen_address
from tercet.ipc.client import Client, EngineDied
from tercet.ipc.messages import SamplingParams

KEY = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def daemon(ids_only_model: Path) -> Iterator[Daemon]:
    address = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--load-format", "null", "--listen", address, "--listen-key", KEY)
    with Daemon(str(ids_only_model), *flags) as daemon:
        yield daemon


async def test_with_the_key(daemon: Daemon) -> None:
    async with Client(daemon.address, key=KEY) as client:
        assert len((await client.generate([1], SamplingParams(max_tokens=5, ignore_eos=True))).token_ids) == 5


@pytest.mark.parametrize(("key", "words"), [(KEY[:-1] + "0", "this key"), (None, "clients without a key")])
async def test_without_it(daemon: Daemon, key: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Mock(wraps=lifeline.Connection)
    monkeypatch.setattr(lifeline, "Connection", connect)
    with pytest.raises(EngineDied, match=rf"refuses {words}.* TERCET_LISTEN_KEY"):
        async with Client(daemon.address, key=key, connect_timeout=0.7):
            pass
    assert connect.call_count < 5, "it asks again at once, and keeps the door busy"
    await test_with_the_key(daemon)


async def test_a_key_where_none_is_asked_for(ids_only_model: Path, tmp_path: Path) -> None:
    flags = ("--load-format", "null", "--listen", f"ipc://{tmp_path}/open")
    with Daemon(str(ids_only_model), *flags) as daemon, pytest.raises(EngineDied, match="or asks for none"):
        async with Client(daemon.address, key=KEY, connect_timeout=0.7):
            pass


async def test_the_next_engine_at_the_address_asks_for_one(ids_only_model: Path, tmp_path: Path) -> None:
    """Whatever is asked then, and whenever: between two connections as well."""
    flags = ("--load-format", "null", "--listen", f"ipc://{tmp_path}/door")
    with Daemon(str(ids_only_model), *flags) as daemon:
        client = await Client(daemon.address, connect_timeout=0.05, reconnect_timeout=2).__aenter__()
    try:
        with Daemon(str(ids_only_model), *flags, "--listen-key", KEY):
            with pytest.raises(EngineDied, match=r"is gone for .* refuses clients without a key"):
                await client.tokenize("the cat")
            for _ in range(40):
                with pytest.raises(EngineDied, match="refuses clients without a key"):
                    await client.info()
    finally:
        await client.__aexit__()


def by_hand(daemon: Daemon, client_secret: bytes) -> bool:
    """As docs/wire.md says; whether an answer came."""

    def secret(owner: str) -> bytes:
        digest = blake2b(KEY.encode(), digest_size=32, person=b"tercet " + owner.encode()).digest()
        return zmq.utils.z85.encode(digest)

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_serverkey = zmq.curve_public(secret("server"))
        mine = client_secret or secret("client")
        socket.curve_secretkey, socket.curve_publickey = mine, zmq.curve_public(mine)
        socket.connect(daemon.address)
        socket.send(msgpack.packb(["Hello"]))
        return bool(socket.poll(700)) and msgpack.unpackb(socket.recv())[0] == "EngineInfo"


def test_by_hand(daemon: Daemon) -> None:
    assert by_hand(daemon, b"")
    stranger = zmq.curve_keypair()[1]
    assert not by_hand(daemon, stranger), "who only knows the engine's public key gets in"


def test_what_a_key_has_to_be() -> None:
    check_listen_address("tcp://0.0.0.0:5555", keyed=True)
    for host in ("*", "example.org", "eth0"):
        with pytest.raises(ValueError, match="IP address of an interface"):
            check_listen_address(f"tcp://{host}:5555", keyed=True)
    with pytest.raises(ValueError, match=r"or a --listen-key"):
        EngineConfig(model="x", listen=("tcp://0.0.0.0:5555",))
    EngineConfig(model="x", listen=("tcp://0.0.0.0:5555",), listen_key=KEY)
    for key in ("short", "x" * 513, "ä" * 40, "\n" * 40):
        with pytest.raises(ValueError, match="--listen-key got a key of"):
            EngineConfig(model="x", listen_key=key)
