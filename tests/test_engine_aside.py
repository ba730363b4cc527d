"""What waits to be tokenized is bounded, by number and by bytes: whoever comes then is told at once to come back."""

import asyncio
import threading
from array import array
from pathlib import Path
from unittest.mock import Mock

import anyio
import msgspec
import pytest

from tercet.engine import reception
from tercet.engine.aside import Aside
from tercet.engine.config import EngineConfig
from tercet.engine.front_desk import FrontDesk
from tercet.engine.live import Live
from tercet.engine.preparation import Prepared
from tercet.engine.reception import Reception
from tercet.engine.rules import make_rules
from tercet.engine.text_codec import load_codec
from tercet.engine.tokenizer_loop import Tokenizer
from tercet.ipc.answers import Detokenized, Failed, ToClient, Tokenized
from tercet.ipc.front_door import Delivery
from tercet.ipc.messages import (
    Detokenize,
    FromClient,
    Generate,
    GenerateIds,
    Handling,
    Question,
    Request,
    SamplingParams,
    Tokenize,
)
from tercet.ipc.process_messages import Limits

CONFIG = EngineConfig(model="tiny", max_num_seqs=1, max_queued_requests=2, max_queued_tokens=10_000)
"""Three may wait, with 40,000 bytes."""
LONG = "x" * 3000


class PatientReception(Reception):
    """What takes time waits until it is told to go on."""

    def __init__(self, folder: Path) -> None:
        codec = load_codec(folder)
        limits = Limits(10_000, 500_000, 257, "float32", "cpu", 8)
        rules = make_rules(codec, limits, CONFIG)
        super().__init__(FrontDesk(codec.pieces), codec, rules, CONFIG)
        self.may_go_on = threading.Event()

    def prepare(self, live: Live, request: Request) -> Prepared:
        assert self.is_quick(request) or self.may_go_on.wait(10)
        return super().prepare(live, request)

    def answer(self, question: Question) -> Tokenized | Detokenized | Failed:
        assert self.is_quick(question) or self.may_go_on.wait(10)
        return super().answer(question)


class Desk:
    """A tokenizer without sockets: what it is asked, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.reception, self.scheduler, self.said = PatientReception(folder), Mock(), list[ToClient]()
        self.tokenizer = Tokenizer(
            Mock(send=self._send), self.scheduler, self.reception._desk, self.reception, Aside(CONFIG), Mock()
        )

    def _send(self, client: bytes, message: bytes) -> Delivery:
        self.said.append(msgspec.msgpack.decode(message, type=ToClient))
        return Delivery.SENT

    def ask(self, *messages: FromClient) -> None:
        self.tokenizer._hear_all([[b"client", msgspec.msgpack.encode(message)] for message in messages])

    @property
    def num_submitted(self) -> int:
        return int(self.scheduler.submit.call_count)


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(folder)


async def test_what_writes_nothing_answers_questions(desk: Desk) -> None:
    desk.reception.measure_by(Limits(10, 100, 257, "float32", "cpu", 8, generates=False))
    async with anyio.create_task_group() as desk.tokenizer._tasks:
        desk.ask(Generate("a", "hi"), Tokenize("b", Generate("", "hi")))
    failed, tokenized = desk.said
    assert isinstance(failed, Failed)
    assert (failed.code, desk.num_submitted) == ("not_supported", 0)
    assert "no lm_head.weight" in failed.message
    assert isinstance(tokenized, Tokenized)


async def test_one_question_or_prompt_too_many(desk: Desk) -> None:
    async with anyio.create_task_group() as desk.tokenizer._tasks:
        desk.ask(Generate("a", LONG), Tokenize("b", Generate("", LONG)), Detokenize("c", bytes(4000)))
        assert desk.said == []
        desk.ask(Generate("d", LONG), Tokenize("e", Generate("", LONG)), Detokenize("f", bytes(4000)))
        failed = [one for one in desk.said if isinstance(one, Failed)]
        assert [(one.request_id, one.code, one.retry_after) for one in failed] == [
            ("d", "overloaded", 1.0),
            ("e", "overloaded", 1.0),
            ("f", "overloaded", 1.0),
        ]
        for one in failed:
            assert one.message.startswith("3 requests of 1")
            assert "--max-queued-requests is 2" in one.message
        desk.said.clear()
        desk.ask(Generate("short", "hi"), Tokenize("g", Generate("", "hi")))  # these wait for nobody
        assert desk.num_submitted == 1
        assert isinstance(desk.said.pop(), Tokenized)
        received = array("i", [5]).tobytes()
        desk.ask(Generate("known", LONG, handling=Handling(received_ids=received)))  # was taken once, and goes on
        assert desk.said == []
        desk.reception.may_go_on.set()
    assert {type(one) for one in desk.said} == {Tokenized, Detokenized}
    assert desk.num_submitted == 3
    async with anyio.create_task_group() as desk.tokenizer._tasks:
        desk.ask(*(Generate(name, LONG) for name in ("d", "e", "f")))  # there is room again
    assert desk.num_submitted == 6


async def test_a_scheduler_far_behind_and_too_many_live_requests(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pass: the refusal says when to ask again."""
    desk.scheduler.submit.return_value = False
    desk.ask(Generate("a", "hi"))
    desk.scheduler.submit.return_value = True
    desk.ask(Generate("b", "hi"))
    monkeypatch.setattr(reception, "MAX_LIVE_REQUESTS", 1)
    desk.ask(Generate("c", "hi"))
    failed = [one for one in desk.said if isinstance(one, Failed)]
    assert [(one.request_id, one.code, one.retry_after) for one in failed] == [
        ("a", "overloaded", 1.0),
        ("c", "overloaded", 1.0),
    ]


async def test_too_many_bytes(desk: Desk) -> None:
    async with anyio.create_task_group() as desk.tokenizer._tasks:
        desk.ask(Generate("a", 20 * LONG))  # one alone may be of any size
        assert desk.said == []
        desk.ask(Generate("b", LONG), GenerateIds("ids", bytes(200_000), SamplingParams(max_tokens=1)))
        (failed,) = desk.said
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.code, failed.retry_after) == ("b", "overloaded", 1.0)
        assert "--max-queued-tokens 10000, of 4 bytes each" in failed.message
        assert desk.num_submitted == 1
        desk.reception.may_go_on.set()
        while desk.num_submitted == 1:
            await asyncio.sleep(0.001)
        desk.ask(Generate("b", LONG))
    assert desk.num_submitted == 3
