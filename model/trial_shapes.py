"""How large steps are in which slots try guesses: exact on a CPU, in a few fixed sizes on a GPU, as `step_shape.py` has
those of other steps.

Knows sizes only. Attention takes a slot's tokens for a chunk, so that keys are read once for all of them; in
deterministic mode for decode rows, so that each has the bits that it would have alone.

Shape suffixes: T tokens of the step.
"""

from bisect import bisect_left
from collections.abc import Mapping

from tercet.model.runner_settings import GuessSettings
from tercet.model.step_shape import StepShape, full_rows

_TILE = 64
"""Queries that a program of attention takes, whatever a slot has of them: by these depths were measured."""
_MOST_IN_PARTS = 8
"""Slots whose keys may be cut in parts."""


class TrialShapes:
    """Of one engine."""

    def __init__(self, settings: GuessSettings, *, apart: bool, most_deep: Mapping[int, int]) -> None:
        """`apart`: each token is a decode row; `most_deep`: see `Shapes`."""
        self._num_guesses = settings.num_guesses
        self._apart = apart
        self._most_deep = most_deep
        self._sizes = _sizes(settings.most_slots)
        self.max_tokens = self._padded(self._sizes[-1])

    def exact(self, num_slots: int, whole_logits: bool) -> StepShape:
        """For a CPU."""
        return self._shape(num_slots, num_slots * (self._num_guesses + 1), whole_logits, 0)

    def fit(self, num_slots: int, whole_logits: bool, depth: int) -> StepShape:
        """For a GPU. `depth`: tokens of the longest slot, at most."""
        padded = self._sizes[bisect_left(self._sizes, num_slots)]
        deep = max((deep for deep in self._depths_of(padded) if deep <= depth), default=0)
        return self._shape(padded, self._padded(padded), whole_logits, deep)

    def for_graphs(self) -> list[StepShape]:
        """All that `fit` can say, the largest first."""
        return [
            self._shape(size, self._padded(size), whole_logits, deep)
            for size in self._sizes[::-1]
            for deep in (0, *self._depths_of(size))
            for whole_logits in (False, True)
        ]

    def _shape(self, num_slots: int, num_tokens: int, whole_logits: bool, deep: int) -> StepShape:
        sizes = (num_tokens, 0, 0) if self._apart else (0, num_slots, num_tokens)
        return StepShape(*sizes, whole_logits, deep=deep, num_trials=num_slots, num_guesses=self._num_guesses)

    def _padded(self, num_slots: int) -> int:
        return full_rows(num_slots * (self._num_guesses + 1))

    def _depths_of(self, num_slots: int) -> list[int]:
        if self._apart or num_slots > _MOST_IN_PARTS:
            return []
        return [deep for deep, queries in self._most_deep.items() if num_slots * _TILE <= queries]


def _sizes(most: int) -> list[int]:
    """Powers of two, and the most there are."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]
