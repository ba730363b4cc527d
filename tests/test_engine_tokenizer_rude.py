"""The tokenizer process, real, and clients that leave, take everything back or do not read."""

import subprocess
import sys
import time
from array import array
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from tercet.engine.front_desk import FrontDesk
from tercet.engine.reception import MAX_LIVE_REQUESTS
from tercet.engine.tokenizer_loop import Tokenizer
from tercet.ipc.answers import Batch, Detokenized, Failed, Finished, ToClient, Tokenized
from tercet.ipc.front_door import Delivery
from tercet.ipc.messages import Cancel, Generate
from tercet.ipc.step_messages import Abort, Ended
from tokenizer_process import (
    USAGE,
    TokenizerProcess,
    tokens,
)
from wire_peer import Peer, still_serves


def test_who_asks_without_end_and_reads_nothing_takes_no_memory_without_end() -> None:
    door = Mock()
    door.send = lambda client, message: Delivery.FULL
    tokenizer = Tokenizer(door, Mock(), FrontDesk(None), Mock(draining=False), Mock(), Mock())
    for count in (5, MAX_LIVE_REQUESTS, 5):
        tokenizer._post(b"client", Batch(tuple(Failed(str(name), "invalid_request", "why") for name in range(count))))
    assert len(tokenizer._owed._of[b"client"]) == MAX_LIVE_REQUESTS


def test_a_question_whose_answer_has_no_room_fails() -> None:
    door = Mock()
    door.send = lambda client, message: Delivery.FULL
    tokenizer = Tokenizer(door, Mock(), FrontDesk(None), Mock(draining=False), Mock(), Mock())
    tokenizer._post(b"client", Tokenized("a", b""))
    tokenizer._post(b"client", Detokenized("b", ""))
    assert [(one.request_id, one.code) for one in tokenizer._owed._of[b"client"] if isinstance(one, Failed)] == [
        ("a", "slow_client"),
        ("b", "slow_client"),
    ]


def aborted(engine: TokenizerProcess, wanted: set[int]) -> None:
    """These, and only these, are aborted within a few seconds."""
    got: set[int] = set()
    while got != wanted:
        message = engine.next_message()
        assert isinstance(message, Abort)
        got |= set(memoryview(message.numbers).cast("q"))
        assert got <= wanted


@pytest.mark.parametrize("state", ["waiting", "streaming"])
def test_a_client_that_vanishes(engine: TokenizerProcess, context: zmq.Context[Any], state: str) -> None:
    stays, goes = Peer(context, engine.address), Peer(context, engine.address)
    stays.ask(Generate("a", "hi"))
    kept = engine.next_submit().number
    numbers = set()
    for name in "xyz":
        goes.ask(Generate(name, "hi"))
        numbers.add(engine.next_submit().number)
    if state == "streaming":
        engine.send(tokens(dict.fromkeys(numbers, 70)))
        goes.receive()
    goes.socket.close(linger=0)
    aborted(engine, numbers)
    engine.sample(kept, "still here", Ended(kept, "length", None, USAGE))
    assert stays.answer("a")[0] == "still here"


def test_a_client_process_that_is_killed(engine: TokenizerProcess) -> None:
    program = (
        "import sys, time, zmq, msgpack; s = zmq.Context().socket(zmq.DEALER); s.connect(sys.argv[1]); "
        "s.send(msgpack.packb(['Generate', 'a', 'hi'])); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", program, engine.address])
    number = engine.next_submit(20).number
    client.kill()
    client.wait()
    aborted(engine, {number})


def test_a_storm_of_cancels(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    peer = Peer(context, engine.address)
    for i in range(500):
        peer.ask(Generate(str(i), "hi"))
        peer.ask(Cancel(str(i)))
    ends = [peer.item() for _ in range(500)]
    assert {end.request_id for end in ends} == {str(i) for i in range(500)}
    assert all(isinstance(end, Finished) and end.reason == "cancelled" for end in ends)
    submitted, ended = set(), set()
    while len(ended) < 500:
        message = engine.next_message()
        if isinstance(message, Abort):
            ended |= set(memoryview(message.numbers).cast("q"))
        else:
            submitted.add(message.number)
    assert submitted == ended
    assert peer.is_quiet()
    still_serves(engine, peer)


def test_a_client_that_does_not_read(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    slow, quick = context.socket(zmq.DEALER), Peer(context, engine.address)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.connect(engine.address)
    slow.send(msgspec.msgpack.encode(Generate("a", "hi")))
    number = engine.next_submit().number
    quick.ask(Generate("q", "hi"))
    kept = engine.next_submit().number
    gone: Abort | None = None
    for _ in range(40_000):
        engine.send(tokens({number: 70}))
        time.sleep(0.0001)  # else several steps make one message
        message = engine._submits.receive(0)
        if message is not None:
            assert isinstance(message, Abort)
            gone = message
            break
    assert gone == Abort(array("q", [number]).tobytes())
    engine.sample(kept, "undisturbed", Ended(kept, "length", None, USAGE))
    assert quick.answer("q")[0] == "undisturbed"
    # Once it reads, it learns its end.
    last: ToClient | None = None
    while slow.poll(5000):
        last = msgspec.msgpack.decode(slow.recv(), type=ToClient)
        if isinstance(last, Batch) and isinstance(last.items[0], Failed):
            break
    assert isinstance(last, Batch)
    (failed,) = last.items
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("a", "slow_client")
    slow.close(linger=0)
