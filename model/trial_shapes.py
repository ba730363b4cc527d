"""How large steps are in which slots try guesses: exact on a CPU, in a few fixed sizes on a GPU, as `padded_shapes.py`
has those of other steps. Knows sizes only.
"""

from bisect import bisect_left

from tercet.model.runner_settings import GuessSettings
from tercet.model.step_shape import StepShape


class TrialShapes:
    """Of one engine."""

    def __init__(self, settings: GuessSettings) -> None:
        self._num_guesses = settings.num_guesses
        self.tries = settings.num_guesses + 1
        self._sizes = _sizes(settings.most_slots)
        self.max_rows = self._sizes[-1] * self.tries

    def exact(
        self, num_slots: int, whole_logits: bool = False, adjusted: bool = False, logged: bool = False
    ) -> StepShape:
        """For a CPU. What some row wants is as in `Shapes.fit`."""
        whole_logits |= adjusted or logged
        rows, guesses = num_slots * self.tries, self._num_guesses
        return StepShape(rows, 0, 0, whole_logits, adjusted, logged, num_trials=num_slots, num_guesses=guesses)

    def fit(
        self, num_slots: int, whole_logits: bool = False, adjusted: bool = False, logged: bool = False
    ) -> StepShape:
        """For a GPU."""
        return self.exact(self._sizes[bisect_left(self._sizes, num_slots)], whole_logits, adjusted, logged)

    def for_graphs(self) -> list[StepShape]:
        """All that `fit` can say of slots that want nothing special, the largest first."""
        return [self.exact(size, whole_logits) for size in self._sizes[::-1] for whole_logits in (False, True)]


def _sizes(most: int) -> list[int]:
    """Powers of two, and the most there are."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]
