"""Many questions to an engine beside each other: a step takes as long for one as for several."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


def at_once(ask: Callable[[Question], Answer], questions: Iterable[Question]) -> list[Answer]:
    """Their answers, in the order of the questions."""
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(ask, questions))
