"""Finds what is best together: of several things all pairs are tried, over and over, until no pair is better.

One thing at a time is not enough where a change pays only beside another. Knows nothing of what it tries.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

_Name = TypeVar("_Name", bound=Hashable)
_Value = TypeVar("_Value")


def best_together(
    values: Mapping[_Name, Sequence[_Value]],
    cost: Callable[[Mapping[_Name, _Value]], float],
    *,
    gain: float,
    in_time: Callable[[], bool],
) -> dict[_Name, _Value]:
    """The cheapest choice found, from the first value of each name on.

    `gain`: by what share a choice has to be better; `in_time` is asked before each cost.
    """
    best = {name: some[0] for name, some in values.items()}
    least = cost(best)
    better = True
    while better:
        better = False
        for one, other in itertools.combinations(values, 2):
            start = dict(best)
            for pair in itertools.product(values[one], values[other]):
                tried = {**start, one: pair[0], other: pair[1]}
                if tried == start:
                    continue
                if not in_time():
                    return best
                if (found := cost(tried)) < least * (1 - gain):
                    best, least, better = tried, found, True
    return best
