"""Typed sockets: nothing lost, nothing of a wrong shape let through, no address taken from somebody alive."""

import asyncio
import random
import socket as os_socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tercet.ipc.addresses import Addresses, check_listen_address, make_addresses
from tercet.ipc.front_door import Delivery, FrontDoor
from tercet.ipc.sockets import AddressInUse, AsyncInbox, Inbox, Outbox, Readiness
from tercet.ipc.step_messages import Abort, Load, Sampled, Submit, Tokens, ToTokenizer

LOAD = Load(1, 2, 3, 4, 5, 6, 7, 8)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def free_port() -> int:
    with os_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------ inboxes


def test_a_sender_may_come_before_the_receiver(address: str) -> None:
    outbox = Outbox(address)
    outbox.send(Abort(b"12345678"))
    inbox = Inbox[Abort | Sampled](address, Abort | Sampled)
    assert inbox.receive(5) == Abort(b"12345678")
    outbox.send_encoded(msgspec.msgpack.encode(Sampled(1, 2, b"")))
    assert outbox.try_send(Sampled(3, 4, b""))
    assert inbox.receive(5) == Sampled(1, 2, b"")
    assert inbox.receive(5) == Sampled(3, 4, b"")
    began = time.monotonic()
    assert inbox.receive(0.05) is None
    assert 0.04 < time.monotonic() - began < 2
    assert inbox.receive(0) is None
    assert list(inbox.receive_all()) == []
    for number in range(5):
        outbox.send(Sampled(number, 0, b""))
    time.sleep(0.1)
    assert [message.step_id for message in inbox.receive_all() if isinstance(message, Sampled)] == [0, 1, 2, 3, 4]
    inbox.close()
    outbox.close()


def test_a_wrong_shape_is_an_error_and_the_next_message_comes(address: str) -> None:
    inbox, outbox = Inbox[Abort](address, Abort), Outbox(address)
    outbox.send(LOAD)
    outbox.send_encoded(b"\xff\xff")
    outbox.send(Abort(b""))
    for _ in range(2):
        with pytest.raises(msgspec.DecodeError):
            inbox.receive(5)
    assert inbox.receive(5) == Abort(b"")
    inbox.close()
    outbox.close()


def test_sending_to_nobody_does_not_wait_until_very_many(address: str) -> None:
    outbox = Outbox(address)
    sent = 0
    while outbox.try_send(LOAD):
        sent += 1
        assert sent < 20_000
    assert sent >= 5000
    outbox._socket.close(linger=0)


def test_no_receive_waits_its_whole_time_while_a_message_is_there(address: str) -> None:
    """Bursts and pauses at all distances from each other, from threads of their own."""
    inbox: Inbox[Abort] = Inbox(address, Abort)
    num_senders, num_bursts, timeout = 3, 300, 20.0

    def send(seed: int) -> None:
        outbox, rng = Outbox(address), random.Random(seed)
        for burst in range(num_bursts):
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                outbox.send(Abort(struct.pack("<qd", burst, time.monotonic())))
            time.sleep(rng.choice((0.0, 0.0001, 0.001, 0.003)))
        outbox.send(Abort(b""))
        outbox.close()

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(num_senders)]
    for thread in threads:
        thread.start()
    ends, latest = 0, 0.0
    while ends < num_senders:
        message = inbox.receive(timeout)
        assert message is not None, "a receive gave up although messages were still to come"
        if message.numbers:
            latest = max(latest, time.monotonic() - struct.unpack("<qd", message.numbers)[1])
        else:
            ends += 1
    for thread in threads:
        thread.join()
    inbox.close()
    assert latest < timeout / 2  # far from any speed, and far from a receive that slept its time out


async def test_async_inbox_loses_nothing_and_keeps_the_order(address: str) -> None:
    inbox: AsyncInbox[ToTokenizer] = AsyncInbox(address, ToTokenizer)
    count = 5000

    def send() -> None:
        outbox = Outbox(address)
        for number in range(count):
            outbox.send(Tokens(number.to_bytes(8, "little"), b"", ()))
            if number % 100 == 0:
                time.sleep(0.001)  # so that the receiver falls asleep again and again
        outbox.close()

    thread = threading.Thread(target=send)
    thread.start()
    numbers: list[int] = []
    async with asyncio.timeout(20):
        while len(numbers) < count:
            messages = await inbox.receive()
            assert messages
            numbers += [
                int.from_bytes(message.numbers, "little") for message in messages if isinstance(message, Tokens)
            ]
    assert numbers == list(range(count))
    thread.join()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await inbox.receive()
    inbox.close()


async def test_a_socket_that_sends_and_receives_misses_no_wake_up(
    address: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Sending swallows the signal that something has come; two sides that answer each other would then hang."""
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(address)
    dealer.connect(address)
    ends = Readiness(router), Readiness(dealer)
    rounds, width = 1500, 3

    async def echo() -> None:
        while True:
            for frames in await ends[0].receive():
                router.send_multipart(frames)
                ends[0].refresh()

    async def play() -> None:
        for _ in range(width):
            dealer.send(b"ball")
        received = 0
        while received < rounds:
            for _ in await ends[1].receive():
                received += 1
                dealer.send(b"ball")
                ends[1].refresh()

    task = asyncio.ensure_future(echo())
    async with asyncio.timeout(20):
        await play()
    task.cancel()
    for end in ends:
        end.stop()


# ---------------------------------------------------------------------------------------------- addresses


def test_addresses_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    addresses = make_addresses(3)
    assert stat.S_IMODE(Path(addresses.directory).stat().st_mode) == 0o700
    inside = [addresses.tokenizer, addresses.scheduler, *addresses.workers, *addresses.listen]
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


# --------------------------------------------------------------------------------------------- front door


async def test_several_doors_and_who_has_left(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    tcp = f"tcp://127.0.0.1:{free_port()}"
    door = FrontDoor([address, tcp], context)
    door.open()
    clients = [context.socket(zmq.DEALER) for _ in range(2)]
    names = []
    async with asyncio.timeout(10):
        for client, where in zip(clients, [address, tcp], strict=True):
            client.connect(where)
            client.send(b"hello")
            ((name, frame),) = await door.receive()
            assert frame == b"hello"
            assert door.send(name, b"back") is Delivery.SENT
            assert client.poll(5000)
            assert client.recv() == b"back"
            names.append(name)
        assert door.send(b"nobody", b"") is Delivery.GONE
        clients[0].close(linger=0)
        await door.departure()
        await asyncio.sleep(0.1)
    assert door.send(names[0], b"") is Delivery.GONE
    assert door.send(names[1], b"") is Delivery.SENT
    clients[1].close(linger=0)
    door.close()


async def test_sending_to_who_has_left_misses_no_wake_up(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    door = FrontDoor([address], context)
    door.open()
    client = context.socket(zmq.DEALER)
    try:
        client.connect(address)
        for text in (b"first", b"second", b"third"):
            receiving = asyncio.ensure_future(door.receive())
            await asyncio.sleep(0.05)  # it waits
            client.send(text)
            time.sleep(0.2)  # the message arrives while the event loop is busy with something else
            assert door.send(b"nobody", b"words") is Delivery.GONE
            ((_, received),) = await asyncio.wait_for(receiving, 5)
            assert received == text
    finally:
        client.close(linger=0)
        door.close()


async def test_a_client_that_does_not_read_is_not_sent_for_ever(
    address: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    door = FrontDoor([address], context)
    door.open()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RCVHWM, 1)
    client.connect(address)
    client.send(b"hello")
    async with asyncio.timeout(10):
        ((name, _),) = await door.receive()
    sent = 0
    while (delivery := door.send(name, bytes(10_000))) is Delivery.SENT:
        sent += 1
        assert sent < 100_000
    assert delivery is Delivery.FULL
    client.close(linger=0)
    door.close()


async def test_bytes_that_are_no_zeromq_harm_nobody(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    door = FrontDoor([address], context)
    door.open()
    for raw in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" + bytes(8) + b"\x7f\x03", b""):
        with os_socket.socket(os_socket.AF_UNIX) as stranger:
            stranger.connect(address.removeprefix("ipc://"))
            stranger.sendall(raw)
    client = context.socket(zmq.DEALER)
    client.connect(address)
    client.send(b"hello")
    async with asyncio.timeout(10):
        ((_, frame),) = await door.receive()
    assert frame == b"hello"
    client.close(linger=0)
    door.close()


def test_submits_cross_processes_packed(address: str) -> None:
    """The scheduler's inbox decodes what the tokenizer's outbox encodes, ids and all."""
    inbox, outbox = Inbox[Submit | Abort](address, Submit | Abort), Outbox(address)
    outbox.send_encoded(
        msgspec.msgpack.encode(["Submit", 5, bytes(range(8)), [0.5, 1, 1.0, 0.0, 2**63 - 1, 7, 0, b""], "salt"])
    )
    submit = inbox.receive(5)
    assert isinstance(submit, Submit)
    assert (submit.number, submit.prompt_ids, submit.sampling.seed) == (5, bytes(range(8)), 2**63 - 1)
    inbox.close()
    outbox.close()
