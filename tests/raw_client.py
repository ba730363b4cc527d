"""A client of zmq and msgpack alone, written from docs/wire.md; nothing of Tercet is imported here."""

from collections.abc import Iterator
from typing import Any

import msgpack
import zmq


class RawClient:
    """One connection."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, *message: Any) -> None:
        self.socket.send(msgpack.packb(message))

    def receive(self) -> list[Any]:
        while self.socket.poll(10_000):
            message: list[Any] = msgpack.unpackb(self.socket.recv())
            if message != ["Batch", []]:  # says nothing
                return message
        raise AssertionError("no answer")

    def items(self) -> Iterator[list[Any]]:
        """Deltas and ends, wherever they come."""
        while True:
            kind, *fields = self.receive()
            yield from fields[0] if kind == "Batch" else [[kind, *fields]]

    def answers(self, count: int) -> dict[str, tuple[str, list[int], list[Any]]]:
        """Text, token ids and the message that ended it, of the next `count` requests to end."""
        texts: dict[str, str] = {}
        ids: dict[str, bytes] = {}
        ends: dict[str, list[Any]] = {}
        for item in self.items():
            kind, request_id, *fields = item
            if kind in ("Delta", "Finished"):
                texts[request_id] = texts.get(request_id, "") + fields[0]
                ids[request_id] = ids.get(request_id, b"") + fields[1]
            if kind != "Delta":
                ends[request_id] = item
            if len(ends) == count:
                break
        return {
            name: (texts.get(name, ""), list(memoryview(ids.get(name, b"")).cast("i")), end)
            for name, end in ends.items()
        }

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()
