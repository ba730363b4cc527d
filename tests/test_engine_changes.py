"""What the supervisor does about an order, called: who is asked, who is told, and what is kept for who comes later.

Whole engines: test_engine_sleep.py, test_engine_update_weights.py, test_engine_adapters_later.py.
"""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from tercet.engine.changes import Changes
from tercet.engine.child import Paths
from tercet.engine.children import Post
from tercet.engine.config import EngineConfig
from tercet.engine.watch import HTTP, TOKENIZER
from tercet.ipc.change_messages import LoadAdapter, Sleep, UnloadAdapter, UpdateWeights, WakeUp
from tercet.ipc.process_messages import (
    ExchangeWeights,
    LoadedAdapter,
    Order,
    Outcome,
    PlaceAdapter,
    Standing,
    Tried,
    TryWeights,
)

WORKERS = [Post("worker", 0), Post("worker", 0), Post("worker", 1)]
SCHEDULERS = [Post("scheduler", 0), Post("scheduler", 1)]


class Played:
    """A crew and a watch, played: two ranks of one replica, one of another."""

    def __init__(self, max_adapters: int = 2) -> None:
        self.children = [self.child(post) for post in (*WORKERS, *SCHEDULERS, HTTP, TOKENIZER)]
        self.lacks_workers, self.failure, self.noted = False, None, list[str]()
        config = EngineConfig(model="m", adapter=("sql=/sql",), max_adapters=max_adapters, data_parallel_size=2)
        self.changes = Changes(config, self, Paths("/m", adapters=("/sql",)))  # type: ignore[arg-type]
        self.num_orders = 0

    def child(self, post: Post) -> Any:
        told: list[Any] = []
        child = Mock(post=post, told=told, tell=told.append)
        child.name = post.role
        return child

    def of(self, posts: list[Post]) -> list[Any]:
        return [child for child in self.children if child.post in posts]

    def only(self, post: Post) -> Any:
        return next((child for child in self.children if child.post == post), None)

    def wake(self) -> None:
        pass

    def send_away(self) -> None:
        self.noted.append("away")
        self.lacks_workers = True

    def send_for(self, *, on_trial: bool, other_weights: bool) -> None:
        self.noted.append("on trial" if on_trial else "back")
        self.failure = None

    def put_on_trial(self) -> None:
        self.failure = None

    def begin_anew(self) -> None:
        self.noted.append("anew")

    def order(self, change: Any, **more: bool) -> None:
        self.num_orders += 1
        self.changes.order(self.only(TOKENIZER), Order(self.num_orders, change, **more))
        self.turn()

    def turn(self) -> None:
        """Until whoever looks for a file has found it."""
        for _ in range(5):
            self.changes.turn(self)  # type: ignore[arg-type]
            time.sleep(0.01)

    def reply(self, *complaints: str | None) -> None:
        for worker, complaint in zip(self.children, complaints, strict=False):
            self.changes.note(worker, Tried(self.num_orders, complaint))
        self.turn()

    @property
    def outcome(self) -> Outcome | None:
        """Of the last order."""
        said = self.only(TOKENIZER).told
        return said[-1] if said and isinstance(said[-1], Outcome) and said[-1].number == self.num_orders else None


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    return str(tmp_path)


def test_an_adapter_is_loaded_when_every_worker_has_it(adapter: str) -> None:
    played = Played()
    played.order(LoadAdapter("", "poems", adapter))
    assert all(worker.told == [PlaceAdapter(1, 1, adapter)] for worker in played.children[:3])
    played.reply(None, None)
    assert played.outcome is None
    played.reply(None, None, None)
    assert played.outcome == Outcome(1)
    sql, poems = LoadedAdapter("sql", 0, 0), LoadedAdapter("poems", 1, 1)
    assert played.only(HTTP).told == played.only(TOKENIZER).told[:-1] == [Standing("m", adapters=(sql, poems))]
    assert played.changes.paths.adapters == ("/sql", adapter)
    played.order(LoadAdapter("", "more", adapter))
    assert played.outcome == Outcome(2, "no_room", "all 2 places (--max-adapters) are taken, by 'sql', 'poems'")
    played.order(UnloadAdapter("", "sql"))
    assert played.outcome == Outcome(3)
    assert played.changes.paths.adapters == (None, adapter)
    played.order(LoadAdapter("", "sql", adapter))
    played.reply(None, None, None)
    assert played.changes.standing.adapters == (poems, LoadedAdapter("sql", 0, 2))


def test_an_adapter_that_a_worker_refuses_or_dies_of_is_not_there(adapter: str) -> None:
    played = Played()
    before = played.changes.paths, played.changes.standing
    played.order(LoadAdapter("", "poems", adapter))
    played.reply(None, "it does not fit")
    assert played.outcome is None, "the third may still be writing to the place"
    played.reply(None, "it does not fit", None)
    assert played.outcome == Outcome(1, "invalid_request", "it does not fit")
    played.order(LoadAdapter("", "poems", adapter))
    del played.children[1]
    played.children.insert(1, played.child(WORKERS[1]))
    played.reply(None, None, None)
    assert played.outcome is not None
    assert played.outcome.code == "change_failed"
    assert "died while it looked at" in played.outcome.message
    assert (played.changes.paths, played.changes.standing) == before


def test_one_worker_looks_at_weights_before_anybody_ends(adapter: str) -> None:
    played = Played()
    played.order(UpdateWeights("", adapter), only_try=True)
    assert [worker.told for worker in played.children[:3]] == [[TryWeights(1, adapter)], [], []]
    played.reply("another model")
    assert played.outcome == Outcome(1, "invalid_request", "another model")
    played.order(UpdateWeights("", adapter), only_try=True)
    played.reply(None)
    assert played.outcome == Outcome(2)
    assert not played.noted
    assert [child.told for child in played.of(SCHEDULERS)] == [[], []]


def test_weights_are_those_that_every_worker_has_read(adapter: str) -> None:
    played = Played()
    played.order(UpdateWeights("", adapter))
    assert [child.told for child in played.of(SCHEDULERS)] == [[ExchangeWeights(1, adapter)]] * 2
    assert played.changes.paths.weights == adapter
    played.reply(None, None)
    assert not played.noted
    assert played.outcome is None
    played.reply(None, None, None)
    assert played.noted == ["anew"]
    assert played.outcome == Outcome(1)
    assert played.changes.standing.weights == adapter


@pytest.mark.parametrize("why", ["refused", "a worker died", "a scheduler died"])
def test_weights_that_are_not_read_are_other_workers(adapter: str, why: str) -> None:
    played = Played()
    played.order(UpdateWeights("", adapter))
    match why:
        case "refused":
            played.reply(None, "they are kept otherwise")
        case "a worker died":
            played.failure = "worker 0 was killed"  # type: ignore[assignment]
        case _:
            played.children[4] = played.child(SCHEDULERS[1])
    played.turn()
    assert played.noted == ["away", "on trial"]
    assert played.outcome is None
    played.lacks_workers = False
    played.turn()
    assert played.outcome == Outcome(1)
    assert played.changes.standing.weights == adapter


def test_nobody_is_told_to_read_while_somebody_is_replaced(adapter: str) -> None:
    played = Played()
    scheduler = played.children.pop(4)
    played.lacks_workers = True
    played.order(UpdateWeights("", adapter))
    played.lacks_workers = False
    played.turn()
    assert not played.children[3].told
    played.children.insert(4, scheduler)
    played.turn()
    assert [child.told for child in played.of(SCHEDULERS)] == [[ExchangeWeights(1, adapter)]] * 2


def test_what_takes_too_long_is_not_waited_for(adapter: str) -> None:
    played = Played()
    played.changes._config = structs.replace(played.changes._config, startup_timeout=0.1)
    played.order(UpdateWeights("", adapter))
    time.sleep(0.1)
    played.turn()
    assert played.noted == ["away", "on trial"]


def test_weights_that_fail_go_back(adapter: str) -> None:
    played = Played()
    played.order(UpdateWeights("", adapter), only_try=True)
    played.reply(None)
    played.order(UpdateWeights("", adapter))
    played.reply("the file is shorter than it was")
    played.failure = "worker 0: no memory"  # type: ignore[assignment]
    played.turn()
    assert played.noted == ["away", "on trial", "away", "back"]
    assert played.changes.paths.weights is None
    assert played.outcome is None
    played.lacks_workers = False
    played.turn()
    assert played.outcome == Outcome(2, "change_failed", "the weights are those of 'm' as before: worker 0: no memory")


def test_an_engine_that_cannot_be_woken_up_sleeps_on(adapter: str) -> None:
    played = Played()
    played.order(Sleep(""), only_try=True)
    assert played.only(HTTP).told == [Standing("m", falls_asleep=True, adapters=(LoadedAdapter("sql", 0, 0),))]
    assert not played.noted
    played.order(Sleep(""))
    assert played.changes.standing.is_asleep
    assert not played.changes.standing.falls_asleep
    for change in (LoadAdapter("", "poems", adapter), UpdateWeights("", adapter)):
        played.order(change)
        assert played.outcome is not None
        assert played.outcome.code == "asleep"
    played.order(WakeUp("", adapter))
    played.failure = "worker 0: no memory"  # type: ignore[assignment]
    played.turn()
    assert played.outcome == Outcome(5, "change_failed", "the engine is asleep as before: worker 0: no memory")
    assert played.noted == ["away", "on trial", "away"]
    assert played.changes.standing.is_asleep
    assert played.changes.paths.weights is None
    played.order(UnloadAdapter("", "sql"))
    played.order(WakeUp(""))
    played.lacks_workers = False
    played.turn()
    assert not played.changes.standing.is_asleep
    assert played.outcome == Outcome(7)


def test_orders_of_a_tokenizer_that_died_are_not_begun(adapter: str) -> None:
    played = Played()
    played.order(LoadAdapter("", "poems", adapter))
    played.order(Sleep(""))
    played.children[-1] = played.child(TOKENIZER)
    played.num_orders = 1
    played.reply(None, None, None)
    assert played.outcome == Outcome(1), "whoever is there hears of it"
    assert not played.noted
    new = played.child(HTTP)
    played.changes.tell(new)
    assert new.told == [played.changes.standing]
    played.num_orders = 2
    played.order(Sleep(""), only_try=True)
    assert played.changes.standing.falls_asleep
    played.children[-1] = played.child(TOKENIZER)
    played.changes.tell(played.children[-1])
    assert not played.changes.standing.falls_asleep
    assert played.only(HTTP).told[-1] == played.only(TOKENIZER).told[-1] == played.changes.standing
