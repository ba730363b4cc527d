"""Cases of which a few stand for all: `make test` runs those few, `make test-long` the others."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

One = TypeVar("One", bound=tuple[Hashable, ...])


def long(*values: Any) -> Any:
    """A case that another one stands for."""
    return pytest.param(*values, marks=pytest.mark.long)


kinds_and_sizes = pytest.mark.parametrize("every_size", [False, long(True)], ids=["each kind", "every size"])


def covering(together: int, **parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by all combinations; `long` are those beyond so few that any `together` values meet in one of them.

    2: whatever goes wrong between two parameters is found at once, as long as it needs no third.
    """
    grid = list(product(*(range(len(values)) for values in parameters.values())))
    few = few_of(grid, together)
    return pytest.mark.parametrize(
        list(parameters),
        [
            (pytest.param if one in few else long)(
                *(values[i] for values, i in zip(parameters.values(), one, strict=True))
            )
            for one in grid
        ],
    )


def few_of(grid: Collection[One], together: int) -> list[One]:
    """So few of these combinations that any `together` values that meet in one of them all meet in one of the few."""
    unmet = {meeting for one in grid for meeting in _meetings(one, together)}
    few = []
    while unmet:
        few.append(max(grid, key=lambda one: len(unmet.intersection(_meetings(one, together)))))
        unmet.difference_update(_meetings(few[-1], together))
    return few


def _meetings(one: tuple[Hashable, ...], together: int) -> Iterator[tuple[tuple[int, Hashable], ...]]:
    """Which values, each with its parameter's number, meet in a combination."""
    return combinations(enumerate(one), together)
