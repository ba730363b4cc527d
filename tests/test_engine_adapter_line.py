"""Adapters that come and go, called: which names requests may say, and when a place is free."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.engine.adapter_line import AdapterLine
from tercet.engine.config import EngineConfig
from tercet.engine.front_desk import FrontDesk
from tercet.engine.refusal import Refusal
from tercet.ipc.answers import Failed
from tercet.ipc.change_messages import Changed, LoadAdapter, UnloadAdapter
from tercet.ipc.process_messages import LoadedAdapter, Order, Outcome

SQL, POEMS = LoadedAdapter("sql", 0, 0), LoadedAdapter("poems", 1, 1)


class Line:
    """One that knows two adapters, and all that came of it."""

    def __init__(self, max_adapters: int = 3) -> None:
        self.desk = FrontDesk(None)
        self.orders: list[Order] = []
        self.answers: list[Any] = []
        config = EngineConfig(model="tiny", max_adapters=max_adapters)
        answer = lambda client, message: self.answers.append(message)  # noqa: E731
        self.line = AdapterLine(self.desk, config, count(1), self.orders.append, answer)
        self.line.stand((SQL, POEMS))
        self.line.is_settled = True

    def ask(self, change: Any) -> None:
        self.line.ask(b"c", change)

    def has(self, load: int, more: int) -> None:
        """So many answers more go through the adapter."""
        self.desk.outstanding.adapters[load] += more
        self.line.go_on()

    def may_run(self, load: int) -> bool:
        try:
            self.line.check(SimpleNamespace(adapter_load=load))  # type: ignore[arg-type]
        except Refusal:
            return False
        return True


def test_one_that_comes() -> None:
    one = Line()
    one.ask(LoadAdapter("a", "prose", "/prose"))
    assert one.orders == [Order(1, LoadAdapter("a", "prose", "/prose"))]
    assert [*one.line.known] == ["sql", "poems"]
    prose = LoadedAdapter("prose", 2, 2)
    one.line.stand((SQL, POEMS, prose))
    one.line.hear(Outcome(1))
    assert one.answers == [Changed("a")]
    assert one.line.known == {"sql": SQL, "poems": POEMS, "prose": prose}
    one.ask(LoadAdapter("b", "verse", "/verse"))
    one.line.hear(Outcome(2, "no_room", "why"))
    assert one.answers[1:] == [Failed("b", "no_room", "why")]


def test_one_that_leaves_is_waited_for_and_holds_up_no_other() -> None:
    one = Line()
    one.has(0, 2)
    one.ask(UnloadAdapter("a", "sql"))
    one.ask(UnloadAdapter("b", "sql"))
    assert [*one.line.known] == ["poems"]
    assert not one.orders
    assert one.may_run(0), "it was asked before"
    one.ask(UnloadAdapter("c", "poems"))
    assert one.orders == [Order(1, UnloadAdapter("c", "poems"))]
    assert not one.may_run(1), "its place may be another's any time"
    one.ask(LoadAdapter("d", "sql", "/sql"))
    assert one.answers[0].message.endswith("the adapter of that name has not left yet")
    one.has(0, -1)
    assert len(one.orders) == 1
    one.has(0, -1)
    assert one.orders[1:] == [Order(2, UnloadAdapter("a", "sql"))]
    one.line.stand(())
    one.line.hear(Outcome(2))
    one.line.hear(Outcome(1))
    assert one.answers[1:] == [Changed("a"), Changed("b"), Changed("c")]
    again = LoadedAdapter("sql", 0, 2)
    one.line.stand((again,))
    assert (one.may_run(-1), one.may_run(0), one.may_run(2)) == (True, False, True)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (LoadAdapter("a", "sql", "/x"), "invalid_request", "name is 'sql'; want another, or the adapter of that name"),
        (LoadAdapter("a", "tiny", "/x"), "invalid_request", "name is 'tiny'; want another: it is the model's"),
        (LoadAdapter("a", "", "/x"), "invalid_request", "name is of 0 characters; want 1 to 256"),
        (UnloadAdapter("a", "prose"), "not_found", "name is 'prose'; there is 'sql', 'poems'"),
    ],
)
def test_names_that_cannot_be(change: Any, code: str, words: str) -> None:
    one = Line()
    one.ask(change)
    assert not one.orders
    (failed,) = one.answers
    assert (failed.request_id, failed.code) == ("a", code)
    assert words in failed.message


def test_places_have_to_be_reserved() -> None:
    one = Line(max_adapters=0)
    one.ask(LoadAdapter("a", "prose", "/x"))
    one.ask(UnloadAdapter("b", "sql"))
    assert not one.orders
    assert all("started with --max-adapters" in failed.message for failed in one.answers)
    assert len(one.answers) == 2


def test_a_name_is_loaded_once_at_a_time() -> None:
    one = Line()
    one.ask(LoadAdapter("a", "prose", "/x"))
    one.ask(LoadAdapter("b", "prose", "/y"))
    assert len(one.orders) == 1
    assert "is being loaded" in one.answers[0].message
    one.ask(UnloadAdapter("c", "prose"))
    assert one.answers[1].code == "not_found"


def test_what_a_predecessor_had_told_the_supervisor() -> None:
    one = Line()
    one.line.is_settled = False
    one.ask(UnloadAdapter("a", "sql"))
    assert not one.orders
    one.line.stand((POEMS,))
    one.line.is_settled = True
    one.line.go_on()
    assert one.answers == [Changed("a")]
    assert not one.orders


def test_the_end_of_the_engine() -> None:
    one = Line()
    one.has(0, 1)
    one.ask(UnloadAdapter("a", "sql"))
    one.ask(LoadAdapter("b", "prose", "/x"))
    one.line.end("engine_died", "why")
    assert [failed.code for failed in one.answers] == ["engine_died", "engine_died"]
