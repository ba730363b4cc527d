"""Who waits for a first token goes ahead, by turns of the loop; nobody's news change their order."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from tercet.ipc.head_start import HeadStart

T = TypeVar("T")


def by(is_first: Callable[[T], bool]) -> Callable[[Sequence[T]], tuple[list[T], list[T]]]:
    def split(items: Sequence[T]) -> tuple[list[T], list[T]]:
        told = [(item, is_first(item)) for item in items]
        return [item for item, first in told if first], [item for item, first in told if not first]

    return split


async def test_a_reader_some_tasks_away_is_served_before_the_others() -> None:
    """Each of three tasks hands on to the next, as from the engine to an HTTP client; the others' work is one turn."""
    served: list[str] = []
    loop = asyncio.get_running_loop()

    def hand_on(name: str, tasks: int) -> None:
        if tasks:
            loop.call_soon(hand_on, name, tasks - 1)
        else:
            served.append(name)

    def take(name: str) -> None:
        hand_on(name, 3 if name.startswith("first") else 0)

    for turns, wanted in ((0, ["a", "b", "first"]), (3, ["first", "a", "b"]), (8, ["first", "a", "b"])):
        served.clear()
        HeadStart(take, by(lambda name: name.startswith("first")), turns).deliver(["a", "first", "b"])
        for _ in range(12):
            await asyncio.sleep(0)
        assert served == wanted, turns


async def test_nothing_waits_where_nobody_is_ahead() -> None:
    for items in (["a", "b"], ["first"], []):
        served: list[str] = []
        HeadStart(served.append, by(lambda name: name == "first"), 5).deliver(items)
        assert served == items


async def test_each_readers_news_stay_in_order() -> None:
    """Batches come while others are held; some are followed by a message that is not part of any."""
    draw = random.Random()
    served: dict[str, list[int]] = {}
    begun: set[str] = set()

    def take(item: tuple[str, int]) -> None:
        served.setdefault(item[0], []).append(item[1])
        begun.add(item[0])

    ahead = HeadStart(take, by(lambda item: item[0] not in begun), 4)
    sent: dict[str, list[int]] = {}
    for number in range(300):
        names = draw.sample("abcdefghij", draw.randint(0, 10))
        if draw.random() < 0.2:
            gone = draw.choice("abcdefghij")
            ahead.flush()
            begun.discard(gone)
        for name in names:
            sent.setdefault(name, []).append(number)
        ahead.deliver([(name, number) for name in names])
        for _ in range(draw.randint(0, 6)):
            await asyncio.sleep(0)
    ahead.flush()
    assert served == sent


async def test_what_comes_meanwhile_is_not_behind_a_whole_step() -> None:
    """The others are served some at a time; what else the loop has to do gets its turns in between."""
    served: list[object] = []
    loop = asyncio.get_running_loop()
    HeadStart(served.append, by(lambda item: False), 3).deliver(range(100))
    loop.call_soon(served.append, "newcomer")
    for _ in range(50):
        await asyncio.sleep(0)
    assert served.index("newcomer") < 50
    served.remove("newcomer")
    assert served == list(range(100))
    HeadStart(served.append, by(lambda item: False), 0).deliver(range(100))
    assert served == [*range(100), *range(100)], "nothing waits where no turns are asked for"
