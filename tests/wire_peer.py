"""A client as a person would write one: a DEALER socket and the messages, for tests of the tokenizer process."""

import time
from typing import Any

import msgspec
import zmq

from tercet.ipc.answers import Batch, Delta, Failed, Finished, ToClient
from tercet.ipc.messages import FromClient, Generate
from tercet.ipc.step_messages import Ended
from tokenizer_process import USAGE, TokenizerProcess


class Peer:
    """One connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)
        self.waiting: list[Any] = []

    def ask(self, message: FromClient) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> ToClient:
        message = self._next(10)
        assert message is not None, "no answer"
        return message

    def _next(self, seconds: float) -> ToClient | None:
        """Empty batches say nothing (docs/wire.md): they come when some other client has left."""
        end = time.monotonic() + seconds
        while self.socket.poll(max(0.0, end - time.monotonic()) * 1000):
            message: ToClient = msgspec.msgpack.decode(self.socket.recv(), type=ToClient)
            if message != Batch(()):
                return message
        return None

    def item(self) -> Delta | Finished | Failed:
        """The next item, whether in a batch or by itself."""
        while not self.waiting:
            message = self.receive()
            assert isinstance(message, Batch | Failed), message
            self.waiting += message.items if isinstance(message, Batch) else [message]
        return self.waiting.pop(0)

    def answer(self, request_id: str) -> tuple[str, list[int], Finished | Failed]:
        """Text, ids and end of the only running request."""
        text, ids = "", b""
        while True:
            item = self.item()
            assert item.request_id == request_id
            if not isinstance(item, Failed):
                text, ids = text + item.text, ids + item.token_ids
            if not isinstance(item, Delta):
                return text, list(memoryview(ids).cast("i")), item

    def is_quiet(self, seconds: float = 0.1) -> bool:
        return not self.waiting and self._next(seconds) is None


def still_serves(engine: TokenizerProcess, peer: Peer) -> None:
    peer.ask(Generate("proof", "hi"))
    submit = engine.next_submit()
    engine.sample(submit.number, "fine", Ended(submit.number, "length", None, USAGE))
    text, ids, end = peer.answer("proof")
    assert (text, len(ids), isinstance(end, Finished)) == ("fine", 4, True)
