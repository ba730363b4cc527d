"""How long a request may hold up the tokenizer's event loop: what is done in it, and what aside of it."""

import asyncio
import gc
import threading
from array import array
from pathlib import Path
from unittest.mock import Mock

import anyio
import msgspec
import pytest

from tercet.engine import preparation
from tercet.engine.aside import Aside
from tercet.engine.config import EngineConfig
from tercet.engine.detokenizer import Detokenizer
from tercet.engine.front_desk import FrontDesk
from tercet.engine.reception import Reception
from tercet.engine.rules import make_rules
from tercet.engine.text_codec import load_codec
from tercet.engine.tokenizer_loop import Tokenizer
from tercet.ipc.answers import Rejected
from tercet.ipc.messages import FromClient, GenerateIds, Handling, SamplingParams, Structured
from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Submit

STOP = tuple(f"{letter}!" for letter in "abcdefghijklmnop")


class Pushes(list[int]):
    """The thread that each token of those that go on was pushed in."""


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> Pushes:
    pushes = Pushes()

    class Watched(Detokenizer):
        def push(self, token_id: int) -> str:
            pushes.append(threading.get_ident())
            return super().push(token_id)

    monkeypatch.setattr(preparation, "Detokenizer", Watched)
    return pushes


@pytest.fixture
def reception(folder: Path) -> Reception:
    codec, config = load_codec(folder), EngineConfig(model="tiny")
    rules = make_rules(codec, Limits(1000, 20_000, 257, "float32", "cpu", 8), config)
    return Reception(FrontDesk(codec.pieces), codec, rules, config)


@pytest.mark.parametrize(("num_received", "aside"), [(1000, False), (1001, True)])
async def test_answers_that_go_on_from_many_ids_hold_up_nobody(
    reception: Reception, pushes: Pushes, num_received: int, aside: bool
) -> None:
    """Of 256 answers and 16 stop strings it takes many seconds until all is text again."""
    scheduler = Mock()
    line = Aside(EngineConfig(model="tiny"))
    tokenizer = Tokenizer(Mock(), scheduler, reception._desk, reception, line, Mock())
    received = array("i", [7 + i % 200 for i in range(num_received)]).tobytes()
    handling = Handling(received_ids=(received, None, received, b""))
    request = GenerateIds("a", array("i", [5]).tobytes(), SamplingParams(n=4, stop=STOP), handling=handling)
    async with anyio.create_task_group() as tokenizer._tasks:
        tokenizer._admit(b"client", request, 10_000)
        assert scheduler.submit.called == (not aside)
        await asyncio.sleep(0)
    assert len(pushes) == 2 * num_received
    assert (threading.get_ident() not in pushes) == aside
    _, submit = scheduler.submit.call_args.args
    assert isinstance(submit, Submit)
    assert [submit.generated_ids, *(one.generated_ids for one in submit.siblings)] == [received, received, b""]


def test_a_message_of_many_parts_is_not_looked_through_while_it_is_read(reception: Reception) -> None:
    """Of 14 million empty lists most of the time went into that."""
    decoder, collects = reception._decoder, list[bool]()

    def decode(frame: bytes) -> FromClient:
        collects.append(gc.isenabled())
        return decoder.decode(frame)

    reception._decoder = Mock(decode=decode)
    request = GenerateIds("a", b"", SamplingParams(structured=Structured(json_schema={"a": [[], []]})))
    assert reception.decode([msgspec.msgpack.encode(request)]) == request
    assert isinstance(reception.decode([b"no message"]), Rejected)
    assert collects == [False, False]
    assert gc.isenabled()
