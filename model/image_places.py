"""Where the images of a prompt are, and by which positions its tokens are turned.

A token's place in an image has three numbers: when, which row, which column. Text has one, three times, and goes on
behind an image at the first number that none of its tokens has. So an image of 10 by 14 tokens takes 14 turns and not
140, and all tokens behind it are turned less far than they are counted. (Of models whose images are turned as words are
only where images are matters.) Numbers only.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ImagePlace(NamedTuple):
    """Tokens of one image, row by row."""

    first: int
    """Position of the first of them."""
    rows: int
    columns: int
    """With the word behind each row, if there is one."""

    @property
    def stop(self) -> int:
        """The position behind them."""
        return self.first + self.rows * self.columns

    @property
    def shift(self) -> int:
        """How much further than counted those behind it are turned, because of it."""
        return max(self.rows, self.columns) - self.rows * self.columns


class Overlap(NamedTuple):
    """Which tokens of an image are in a stretch of the prompt."""

    image: int
    """Which of the prompt's."""
    start: int
    stop: int
    """Positions."""


class ImagePlaces:
    """Of one prompt."""

    def __init__(self, places: Sequence[ImagePlace]) -> None:
        """In their order; there is one at least."""
        assert all(one.stop <= other.first for one, other in pairwise(places)), places
        self.places = tuple(places)
        self.shift = sum(place.shift for place in places)
        """Of all tokens behind the last."""
        self.stop = places[-1].stop
        """The position behind the last."""

    def turns(self, start: int, stop: int) -> NDArray[np.int32]:
        """[stop - start, 3]: by what the tokens of these positions are turned."""
        turns_N3 = np.repeat(np.arange(start, stop, dtype=np.int32)[:, None], 3, 1)
        shift = 0
        for place in self.places:
            within = slice(max(place.first - start, 0), max(place.stop - start, 0))
            offsets_N = np.arange(start, stop, dtype=np.int32)[within] - place.first
            base = place.first + shift
            turns_N3[within] = np.stack(
                [np.full_like(offsets_N, base), base + offsets_N // place.columns, base + offsets_N % place.columns], 1
            )
            turns_N3[within.stop :] += place.shift
            shift += place.shift
        return turns_N3

    def overlaps(self, start: int, stop: int) -> list[Overlap]:
        """With the positions from `start` to `stop`."""
        some = (Overlap(i, max(start, one.first), min(stop, one.stop)) for i, one in enumerate(self.places))
        return [one for one in some if one.start < one.stop]
