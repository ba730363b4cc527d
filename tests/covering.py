"""Cases of which a few stand for all: `make test` runs those few, `make test-long` the others."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def long(*values: Any) -> Any:
    """A case that another one stands for."""
    return pytest.param(*values, marks=pytest.mark.long)


kinds_and_sizes = pytest.mark.parametrize("every_size", [False, long(True)], ids=["each kind", "every size"])


def covering(together: int, **parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by all combinations; `long` are those beyond so few that any `together` values meet in one of them.

    2: whatever goes wrong between two parameters is found at once, as long as it needs no third.
    """
    grid = list(product(*(range(len(values)) for values in parameters.values())))
    unmet = {meeting for one in grid for meeting in _meetings(one, together)}
    few = set()
    while unmet:
        best = max(grid, key=lambda one: len(unmet.intersection(_meetings(one, together))))
        few.add(best)
        unmet.difference_update(_meetings(best, together))
    return pytest.mark.parametrize(
        list(parameters),
        [
            (pytest.param if one in few else long)(
                *(values[i] for values, i in zip(parameters.values(), one, strict=True))
            )
            for one in grid
        ],
    )


def _meetings(one: tuple[int, ...], together: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Which values, as a parameter's number and that of its value, meet in a combination."""
    return combinations(enumerate(one), together)
