"""Several answers to one prompt at the front desk: one name, one end for each, and what ends them all."""

from array import array

import pytest

from tercet.engine.front_desk import FrontDesk
from tercet.engine.live import Live
from tercet.engine.pieces import Pieces
from tercet.engine.preparation import make_detokenizer
from tercet.ipc.answers import Delta, Failed, Finished
from tercet.ipc.messages import SamplingParams
from tercet.ipc.step_messages import Ended, Sampling, Submit, Unservable
from tokenizer_process import USAGE, byte_tokenizer, tokens

A = b"client a"
PIECES = Pieces(byte_tokenizer())


@pytest.fixture
def desk() -> FrontDesk:
    return FrontDesk(PIECES)


def several(desk: FrontDesk, name: str, n: int, params: SamplingParams | None = None) -> list[Live]:
    live = desk.open(A, name)
    assert live is not None
    lives = desk.split(live, range(n))
    for one in lives:
        sampling = Sampling(1.0, 0, 1.0, 0.0, 50 + one.index, 100, 0, b"")
        submit = Submit(one.number, bytes(12), sampling, "salt", queue_timeout=9.0)
        asked = params or SamplingParams(seed=50)
        desk.submit(one, submit, asked, make_detokenizer(PIECES, asked))
    return lives


def packed(text: str) -> bytes:
    return array("i", byte_tokenizer().encode(text).ids).tobytes()


def byte(text: str) -> int:
    (token_id,) = byte_tokenizer().encode(text).ids
    return token_id


def test_each_answer_has_its_news_and_its_end(desk: FrontDesk) -> None:
    x, y, z = several(desk, "r", 3)
    assert desk.num_live == 3
    items, _ = desk.accept([tokens({x.number: byte("a"), z.number: byte("c")})], 1.0)
    assert items == {A: [Delta("r", "a", packed("a")), Delta("r", "c", packed("c"), index=2)]}
    items, _ = desk.accept([tokens({y.number: byte("b")}, Ended(y.number, "length", None, USAGE))], 1.0)
    assert items == {A: [Finished("r", "b", packed("b"), "length", None, USAGE, 1)]}
    assert desk.open(A, "r") is None, "two answers have not ended"
    desk.accept([tokens({}, Ended(one.number, "length", None, USAGE)) for one in (x, z)], 1.0)
    assert desk.open(A, "r") is not None


def test_all_are_told_the_seed_that_they_count_from(desk: FrontDesk) -> None:
    lives = several(desk, "r", 3, SamplingParams())
    items, _ = desk.accept([tokens({one.number: byte("a") for one in lives})], 1.0)
    assert [(item.index, item.seed) for item in items[A] if isinstance(item, Delta)] == [(0, 50), (1, 50), (2, 50)]
    items, _ = desk.accept([tokens({lives[1].number: byte("a")})], 1.0)
    assert items == {A: [Delta("r", "a", packed("a"), index=1)]}


def test_cancel_ends_those_that_are_left(desk: FrontDesk) -> None:
    x, y, z = several(desk, "r", 3)
    desk.accept([tokens({}, Ended(y.number, "length", None, USAGE))], 1.0)
    lives, ends = desk.cancel(A, "r", 2.0)
    assert lives == [x, z]
    assert [(one.index, one.reason) for one in ends] == [(0, "cancelled"), (2, "cancelled")]
    assert desk.num_live == 0
    assert desk.clients() == []


def test_one_failure_is_all_of_theirs(desk: FrontDesk) -> None:
    x, y, z = several(desk, "r", 3)
    news = [tokens({x.number: byte("a"), z.number: byte("c")}), Unservable(y.number, "timed_out", "too late")]
    assert desk.accept(news, 1.0) == ({A: [Failed("r", "timed_out", "too late")]}, [x, z])
    assert desk.num_live == 0
    lives = several(desk, "s", 2)
    several(desk, "t", 2)
    assert set(desk.drop_client(A)) >= set(lives)
    several(desk, "u", 4)
    assert desk.fail_all("engine_died", "why") == {A: [Failed("u", "engine_died", "why")]}


def test_the_time_of_a_request_is_that_of_its_last_answer(desk: FrontDesk) -> None:
    x, y = several(desk, "r", 2)
    desk.give_time(x, 5.0, 0.0)
    desk.accept([tokens({}, Ended(x.number, "length", None, USAGE))], 1.0)
    assert desk.expire(4.9) == []
    ((lives, failed),) = desk.expire(5.0)
    assert (lives, failed.code) == ([y], "timed_out")
    assert desk.expire(9.0) == []


def test_a_new_scheduler_is_asked_for_what_is_left(desk: FrontDesk) -> None:
    x, y, z = several(desk, "r", 3)
    desk.accept([tokens({y.number: byte("b"), z.number: byte("c")})], 1.0)
    desk.accept([tokens({}, Ended(x.number, "length", None, USAGE))], 1.0)
    (asked,) = desk.renumber()
    submit = asked.submit(1.0, again=True)
    assert (submit.number, submit.sampling.seed, submit.generated_ids, submit.again) == (4, 51, packed("b"), True)
    ((number, seed, generated_ids),) = [(one.number, one.seed, one.generated_ids) for one in submit.siblings]
    assert (number, seed, generated_ids) == (5, 52, packed("c"))
    items, _ = desk.accept([tokens({5: byte("d")})], 1.0)
    assert items == {A: [Delta("r", "d", packed("d"), index=2)]}


def test_what_has_begun_waits_for_a_new_scheduler_as_long_as_that_takes(desk: FrontDesk) -> None:
    """What has not begun has waited from when it was asked for first."""
    x, y = several(desk, "begun", 2)
    waiting, _ = several(desk, "not begun", 2)
    assert [one.asked.submit(1.0).waited for one in (x, waiting)] == [0.0, 0.0]
    desk.accept([tokens({x.number: byte("a")}, Ended(x.number, "length", None, USAGE))], 1.0)
    submits = {asked.request_id: asked.submit(4.0, again=True) for asked in desk.renumber()}
    waits = {name: (submit.queue_timeout, submit.waited) for name, submit in submits.items()}
    assert waits == {"begun": (None, 0.0), "not begun": (9.0, 3.0)}
    assert y.generated.tolist() == []
