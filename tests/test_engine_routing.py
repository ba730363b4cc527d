"""Which replica a request goes to: where its prompt was seen, unless that one has clearly more to do; else in turn."""

import random
from array import array

import pytest

from tercet.engine.routing import ANSWER_TOKENS, BLOCK, Routing

IDLE = [0, 0, 0]


def prompt(*blocks: int, more: int = 0) -> bytes:
    """Of blocks that differ by these numbers, and some tokens behind them."""
    return array("i", [token for block in blocks for token in [block] * BLOCK] + [0] * more).tobytes()


@pytest.fixture
def routing() -> Routing:
    return Routing(3, looks_at_prefixes=True)


def test_equals_take_turns(routing: Routing) -> None:
    assert [routing.choose(prompt(more=BLOCK - 1), "", IDLE) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_least_busy_is_asked(routing: Routing) -> None:
    assert [routing.choose(prompt(), "", work) for work in ([5, 3, 4], [0, 1, 1], [9, 9, 8])] == [1, 0, 2]


def test_the_longest_beginning_counts(routing: Routing) -> None:
    """A whole block of it, at least."""
    assert routing.choose(prompt(1, 2), "", [1, 0, 1]) == 1
    assert routing.choose(prompt(1, 3, 4), "", [3000, 3000, 0]) == 2  # one block is not worth so much
    assert routing.choose(prompt(1, 2, more=9), "", [0, 3 * BLOCK, 0]) == 1
    assert routing.choose(prompt(1, 3, 5), "", [0, 0, 3 * BLOCK]) == 2
    assert routing.choose(prompt(6, 1, 2), "", [0, 1, 1]) == 0, "a chain begins at the beginning"


def test_of_those_who_know_as_much_the_least_busy_is_asked(routing: Routing) -> None:
    for work in ([0, 9, 9], [9, 9, 0]):
        routing.choose(prompt(1), "", [9999 * one for one in work])
    assert routing.choose(prompt(1, 2), "", [110, 0, 100]) == 2


@pytest.mark.parametrize(
    ("work", "chosen"),
    [([2 * BLOCK, 0, 1], 0), ([2 * BLOCK + 1, 0, 1], 1), ([10_000 + 2 * BLOCK, 8000, 9000], 0)],
)
def test_until_that_one_has_clearly_more_to_do(routing: Routing, work: list[int], chosen: int) -> None:
    routing.choose(prompt(1), "", [0, 1, 1])
    assert routing.choose(prompt(1), "", work) == chosen


def test_long_prompts_are_worth_waiting_for(routing: Routing) -> None:
    long = prompt(*range(100))
    routing.choose(long, "", [0, 1, 1])
    assert routing.choose(long, "", [200 * BLOCK, 0, 0]) == 0


def test_salts_and_adapters_have_nothing_in_common(routing: Routing) -> None:
    routing.choose(prompt(1), ("", -1), [0, 1, 1])
    for salt in (("x", -1), ("", 0)):
        assert routing.choose(prompt(1), salt, [1, 0, 1]) == 1


def test_who_is_being_mended_is_not_asked_while_there_are_others(routing: Routing) -> None:
    routing.choose(prompt(1), "", [0, 1, 1])
    assert routing.choose(prompt(1), "", [0, 5, 4], absent={0}) == 2
    assert routing.choose(prompt(9), "", [1, 0, 2], absent={0, 1, 2}) == 1


def test_who_has_lost_its_cache_knows_nothing(routing: Routing) -> None:
    routing.choose(prompt(1), "", [0, 1, 1])
    routing.forget(0)
    assert routing.choose(prompt(1), "", [5, 1, 0]) == 2


def test_nobody_looks_at_prefixes_where_none_is_cached() -> None:
    routing = Routing(2, looks_at_prefixes=False)
    assert [routing.choose(prompt(1), "", [0, 0]) for _ in range(4)] == [0, 1, 0, 1]


def test_it_remembers_so_much_and_the_ends_of_prompts_are_forgotten_first() -> None:
    routing = Routing(2, looks_at_prefixes=True, most_blocks=4)
    routing.choose(prompt(1, 2, 3), "", [0, 1])
    routing.choose(prompt(8, 9), "", [1, 0])
    assert len(routing._seen_by) == 4
    hashes = routing._hashes(prompt(1, 2, 3), "")
    assert routing._longest_seen(hashes, [0, 1]) == ([0], 2)


def test_the_same_history_has_the_same_routes() -> None:
    """And whatever comes, nobody has much more than another for long."""
    draw = random.Random(3)
    asked = [(prompt(*(draw.randrange(3) for _ in range(draw.randrange(9)))), draw.randrange(4)) for _ in range(500)]

    def routes() -> list[int]:
        routing, work, chosen = Routing(4, looks_at_prefixes=True), [0] * 4, list[int]()
        for prompt_ids, ends in asked:
            chosen.append(routing.choose(prompt_ids, "", work))
            work[chosen[-1]] += len(prompt_ids) // 4 + ANSWER_TOKENS
            work[ends] = work[ends] * 3 // 4
            assert max(work) <= 2 * min(work) + 2048
        return chosen

    assert routes() == routes()
