"""Where sockets live: private folders, addresses that are well formed, nobody's taken from somebody alive."""

import socket as os_socket
import stat
from pathlib import Path

import msgspec
import pytest
import zmq

from tercet.ipc.addresses import Addresses, check_listen_address, make_addresses
from tercet.ipc.front_door import FrontDoor
from tercet.ipc.sockets import AddressInUse, Inbox, Outbox
from tercet.ipc.step_messages import Abort


def test_addresses_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    addresses = make_addresses(3)
    assert stat.S_IMODE(Path(addresses.directory).stat().st_mode) == 0o700
    inside = [addresses.tokenizer, addresses.replicas[0].scheduler, *addresses.replicas[0].workers, *addresses.listen]
    assert len(set(inside)) == 6
    assert all(Path(one.removeprefix("ipc://")).parent == Path(addresses.directory) for one in inside)
    assert msgspec.json.decode(msgspec.json.encode(addresses), type=Addresses) == addresses
    assert make_addresses(1, ("tcp://127.0.0.1:5555",)).listen == ("tcp://127.0.0.1:5555",)


def test_a_temporary_folder_too_deep_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ValueError, match=r"bytes; want at most 107 .*TMPDIR"):
        make_addresses(1)
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///a/b",
        "ipc://relative",
        "tcp://127.0.0.1:1",
        "tcp://localhost:65535",
        "tcp://[::1]:80",
        "tcp://127.1.2.3:80",
    ],
)
def test_good_listen_addresses(address: str) -> None:
    check_listen_address(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("tcp://0.0.0.0:80", "loopback"),
        ("tcp://*:80", "loopback"),
        ("tcp://192.168.1.5:80", "loopback"),
        ("tcp://example.org:80", "loopback"),
        ("tcp://[::]:80", "loopback"),
        ("tcp://127.0.0.1", "port"),
        ("tcp://127.0.0.1:0", "port"),
        ("tcp://127.0.0.1:*", "port"),
        ("tcp://127.0.0.1:65536", "port"),
        ("ipc://", "path"),
        ("ipc://@abstract", "path"),
        ("ipc:///" + "x" * 107, "108 bytes"),
        ("http://127.0.0.1:80", "ipc://PATH or tcp://HOST:PORT"),
    ],
)
def test_bad_listen_addresses(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_listen_address(address)


# ------------------------------------------------------------------------------------- addresses in use


def test_an_address_in_use_stays_with_its_owner(address: str) -> None:
    first, outbox = Inbox[Abort](address, Abort), Outbox(address)
    with pytest.raises(AddressInUse, match="another process"):
        Inbox[Abort](address, Abort)
    outbox.send(Abort(b"still!!!"))
    assert first.receive(5) == Abort(b"still!!!")
    first.close()
    outbox.close()


def test_a_file_left_by_the_dead_is_replaced(tmp_path: Path, address: str) -> None:
    with os_socket.socket(os_socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    assert (tmp_path / "s").is_socket()
    inbox, outbox = Inbox[Abort](address, Abort), Outbox(address)
    outbox.send(Abort(b""))
    assert inbox.receive(5) == Abort(b"")
    inbox.close()
    outbox.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path, address: str) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(AddressInUse, match="not a socket"):
        Inbox[Abort](address, Abort)
    assert (tmp_path / "s").read_text() == "precious"


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no folder"):
        Inbox[Abort](f"ipc://{tmp_path}/missing/s", Abort)


def test_a_port_in_use(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with os_socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=address):
            FrontDoor([address], context)
