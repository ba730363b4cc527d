"""The door that clients knock at: several addresses, clients that leave or do not read, bytes that mean nothing."""

import asyncio
import socket as os_socket
import time

import zmq

from tercet.ipc.front_door import Delivery, FrontDoor
from tercet.ipc.readiness import Messages


def free_port() -> int:
    with os_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def receive(door: FrontDoor) -> Messages:
    """What comes next."""
    come: asyncio.Future[Messages] = asyncio.get_running_loop().create_future()
    delivery = asyncio.ensure_future(door.deliver(come.set_result, 1))
    try:
        return await come
    finally:
        delivery.cancel()
        await asyncio.wait([delivery])


async def test_several_doors_and_who_has_left(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    addresses = [f"tcp://[::1]:{free_port()}", address, f"tcp://127.0.0.1:{free_port()}"]
    door = FrontDoor(addresses, context)
    door.open()
    clients = [context.socket(zmq.DEALER) for _ in addresses]
    names = []
    async with asyncio.timeout(10):
        for client, where in zip(clients, addresses, strict=True):
            client.setsockopt(zmq.IPV6, "[" in where)
            client.connect(where)
            client.send(b"hello")
            ((name, frame),) = await receive(door)
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
    for name, client in zip(names[1:], clients[1:], strict=True):
        assert door.send(name, b"") is Delivery.SENT
        client.close(linger=0)
    door.close()


async def test_sending_to_who_has_left_misses_no_wake_up(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    door = FrontDoor([address], context)
    door.open()
    client = context.socket(zmq.DEALER)
    try:
        client.connect(address)
        for text in (b"first", b"second", b"third"):
            receiving = asyncio.ensure_future(receive(door))
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
        ((name, _),) = await receive(door)
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
        ((_, frame),) = await receive(door)
    assert frame == b"hello"
    client.close(linger=0)
    door.close()
