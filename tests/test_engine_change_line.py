"""Changes that clients ask for, called: in what order they are made, and who waits, is refused or is ended for them."""

from itertools import count
from typing import Any

import pytest

from tercet.engine.adapter_line import AdapterLine
from tercet.engine.change_line import ChangeLine, Held
from tercet.engine.config import EngineConfig
from tercet.engine.front_desk import FrontDesk
from tercet.engine.live import Live
from tercet.ipc.answers import Failed
from tercet.ipc.change_messages import Changed, LoadAdapter, Sleep, UpdateWeights, WakeUp
from tercet.ipc.process_messages import Order, Outcome


class Line:
    """One with a desk, and all that came of it."""

    def __init__(self, *, settled: bool = True) -> None:
        self.desk = FrontDesk(None)
        self.orders: list[Order] = []
        self.answers: list[tuple[bytes, Any]] = []
        self.submitted: list[Live] = []
        self.line = ChangeLine(
            self.desk,
            AdapterLine(self.desk, EngineConfig(model="m"), count(2), self.orders.append, self.answer),
            count(2),
            self.orders.append,
            self.answer,
            self.end_all,
            lambda held: self.submitted.append(held.live),
        )
        if settled:
            self.line.settle()

    def answer(self, client: bytes, answer: Any) -> None:
        self.answers.append((client, answer))

    def end_all(self, why: str) -> None:
        self.desk.fail_all("aborted", why)
        self.line.go_on()  # as who sends the ends does

    def runs(self, name: str = "r") -> Live:
        live = self.desk.open(b"c", name)
        assert live is not None
        return live

    def ends(self, live: Live) -> None:
        self.desk.fail(live, "x", "y")
        self.line.go_on()

    def hold(self, live: Live) -> None:
        self.line.hold(Held(live, None, None), 5.0)  # type: ignore[arg-type]

    def done(self, code: str | None = None, **standing: bool) -> None:
        """By the supervisor, which says first how things stand."""
        for name, value in standing.items():
            setattr(self.line, name, value)
        self.line.hear(Outcome(self.orders[-1].number, code, "why"))


def test_sleep_waits_for_what_runs_and_newcomers_are_refused_meanwhile() -> None:
    one = Line()
    live = one.runs()
    assert one.line.refusal is None
    one.line.ask(b"a", Sleep("s"))
    one.line.ask(b"b", WakeUp("w"))
    assert "asleep" in (one.line.refusal or "")
    assert one.orders == [Order(2, Sleep("s"), only_try=True)]
    one.done()
    one.ends(live)
    assert one.orders[1:] == [Order(3, Sleep("s"))]
    assert not one.answers
    one.done(is_asleep=True)
    assert one.answers == [(b"a", Changed("s"))]
    assert one.orders[2:] == [Order(4, WakeUp("w"))]
    assert one.line.refusal is not None
    one.done(is_asleep=False)
    assert one.answers[1:] == [(b"b", Changed("w"))]
    assert one.line.refusal is None


def test_what_runs_may_be_ended_or_kept() -> None:
    one = Line()
    one.runs()
    one.line.ask(b"a", Sleep("s", "abort"))
    one.done()
    assert one.desk.num_live == 0
    assert one.orders[1:] == [Order(3, Sleep("s", "abort"))]
    one.done(is_asleep=True)
    other = Line()
    other.runs()
    other.line.ask(b"a", Sleep("s", "keep"))
    other.done()
    assert other.desk.num_live == 1
    assert other.orders[1:] == [Order(3, Sleep("s", "keep"))]
    assert other.line.refusal is not None


def test_what_is_so_already_is_answered_at_once() -> None:
    one = Line()
    one.line.ask(b"a", WakeUp("w"))
    assert one.answers == [(b"a", Changed("w"))]
    one.line.is_asleep = True
    one.line.ask(b"a", Sleep("s"))
    assert one.answers[1:] == [(b"a", Changed("s"))]
    assert not one.orders
    one.line.ask(b"a", WakeUp("v", "/other"))
    assert len(one.orders) == 1


def test_newcomers_wait_for_other_weights_once_those_are_found_good() -> None:
    one = Line()
    first, change = one.runs("first"), UpdateWeights("u", "/w")
    one.line.ask(b"a", change)
    assert one.orders == [Order(2, change, only_try=True)]
    assert not one.line.holds
    one.done()
    assert one.line.holds
    late, gone = one.runs("late"), one.runs("gone")
    one.hold(late)
    one.hold(gone)
    assert late.asked.waits_since == 5.0
    one.ends(gone)
    assert len(one.orders) == 1
    being_read = one.runs("long text")
    one.ends(first)
    assert len(one.orders) == 1
    one.hold(being_read)
    assert one.orders[1:] == [Order(3, change)]
    one.done()
    assert one.answers == [(b"a", Changed("u"))]
    assert one.submitted == [late, being_read]
    assert not one.line.holds
    assert one.line.refusal is None


def test_weights_that_are_refused_end_nothing_and_hold_nobody() -> None:
    one = Line()
    one.runs()
    one.line.ask(b"a", UpdateWeights("u", "/w", "abort"))
    one.done("invalid_request")
    assert one.answers == [(b"a", Failed("u", "invalid_request", "why"))]
    assert one.desk.num_live == 1
    one.line.ask(b"a", UpdateWeights("k", "/w", "keep"))
    one.done()
    assert len(one.orders) == 3
    assert not one.line.holds, "the scheduler keeps them"
    one.done("change_failed")
    assert one.answers[1:] == [(b"a", Failed("k", "change_failed", "why"))]


def test_a_successor_first_hears_what_had_been_begun() -> None:
    one = Line(settled=False)
    one.line.is_asleep = True
    assert one.line.refusal is None
    one.line.ask(b"a", Sleep("s"))
    assert not one.answers
    one.line.settle()
    assert one.answers == [(b"a", Changed("s"))]
    assert one.line.refusal is not None


@pytest.mark.parametrize("change", [WakeUp("x", ""), UpdateWeights("x", "a" * 5000), LoadAdapter("x", "name", "")])
def test_what_is_no_path(change: Any) -> None:
    one = Line()
    one.line.ask(b"a", change)
    assert not one.orders
    assert "characters; want 1 to 4096" in one.answers[0][1].message


def test_an_outcome_for_another_tokenizer() -> None:
    one = Line()
    one.line.hear(Outcome(7))
    one.line.ask(b"a", Sleep("s"))
    one.line.hear(Outcome(7))
    assert not one.answers


def test_the_end_of_the_engine() -> None:
    one = Line()
    live = one.runs()
    one.line.ask(b"a", Sleep("s"))
    one.done()
    one.line.ask(b"b", WakeUp("w"))
    one.line.drain()
    assert [(client, answer.request_id, answer.code) for client, answer in one.answers] == [
        (b"a", "s", "draining"),
        (b"b", "w", "draining"),
    ]
    one.ends(live)
    assert len(one.orders) == 1
    under_way = Line()
    under_way.line.ask(b"a", UpdateWeights("u", "/w"))
    under_way.line.drain()
    assert not under_way.answers, "the supervisor is at it"
    under_way.line.end()
    assert under_way.answers[0][1].code == "draining"
