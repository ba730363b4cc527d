"""Ids in range or not, as plain Python sees it: every place, every length around a piece, every kind of wrong."""

import random
from array import array

import pytest

from tercet.engine.id_range import all_below

LIMITS = (1, 2, 257, 151_936, 2**17, 2**31 - 1)


@pytest.mark.parametrize("limit", LIMITS)
def test_as_plain_python(limit: int) -> None:
    draw = random.Random(limit)
    for length in (1, 2, 3, 511, 512, 513, 1025, 5000):
        ids = array("i", [draw.randrange(limit) for _ in range(length)])
        ids[draw.randrange(length)] = limit - 1
        assert all_below(ids, limit)
        assert all_below(ids.tolist(), limit)
        for wrong in (limit, -1, -(2**31), 2**31 - 1, draw.randrange(limit, 2**31), -draw.randrange(1, 2**31)):
            for place in {0, length - 1, draw.randrange(length)}:
                bad = array("i", ids)
                bad[place] = wrong
                assert not all_below(bad, limit), (wrong, place, length)


def test_every_lane_alone() -> None:
    for place in range(1030):
        ids = array("i", bytes(4 * 1030))
        ids[place] = 7
        assert all_below(ids, 8)
        assert not all_below(ids, 7)


def test_nothing() -> None:
    assert all_below([], 5)
