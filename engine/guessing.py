"""When it pays to try tokens ahead of those that are sampled. Pure.

What a layer guesses is tried wherever a step has room for it. What is looked up is there now and then: a
step that tries some takes longer than a plain one, and gives a request more tokens the more of them were right. Both
are watched. While steps are plain, it is looked up here for one request in each what would have been tried, so that
nothing is lost on texts that never repeat themselves, and not much on those that begin to.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from tercet.engine.counters import Counters
from tercet.engine.plan_draft import InFlight
from tercet.engine.slot_arrays import SlotArrays
from tercet.engine.speculation import SpeculativeConfig

_STEPS = 16
"""Of each kind, by whose mean it is judged."""
_FEWEST = 4
"""Before it is judged at all."""
_SUPPOSED_COST = 1.3
"""What a step that tries takes, in plain ones, as long as it was not measured."""
_TRUSTED = 400
"""Steps that try, after which a few plain ones are measured again."""
_LASTING = 24
"""Steps that tried behind each other: then it was no mistake to begin."""
_MOST_PATIENCE = 256
"""Plain steps at most, until some may try again: what those before took is forgotten by then."""
_NOTHING = -1
"""Of a row that tried nothing; less than that: of one that was behind a wrong guess."""


class Guessing:
    """Watches all steps of an engine's workers."""

    def __init__(self, config: SpeculativeConfig | None, slots: SlotArrays, counters: Counters) -> None:
        self._config = config
        self._slots = slots
        self._counters = counters
        self._seconds = {True: deque[float](maxlen=_STEPS), False: deque[float](maxlen=_STEPS)}
        """Of steps that try, and of plain ones."""
        self._tokens: deque[float] = deque(maxlen=_STEPS)
        """Of a request in a step that tries, on average."""
        self._hits: deque[bool] = deque(maxlen=_STEPS)
        """Of tokens of plain steps, whether they would have been guessed."""
        self._tries = False
        self._num_tried, self._num_plain = 0, 0
        """Steps of this kind behind each other."""
        self._patience = _FEWEST
        """Plain steps until some may try again."""

    def wanted(self, slots: NDArray[np.int32]) -> int:
        """Guesses of each row of the next plan, which decodes these."""
        config = self._config
        if config is None or len(slots) > config.disable_by_batch_size or self._slots.constrained[slots].any():
            return 0
        if config.looked_up is None:  # the layer guesses in every step that may be followed by one that tries
            return config.num_speculative_tokens
        self._decide(config.num_speculative_tokens)
        if not self._tries:
            self._num_plain += 1
            return 0
        self._num_tried += 1
        return config.num_speculative_tokens

    def completed(self, plan: InFlight, token_ids: NDArray[np.int32], seconds: float | None) -> None:
        """A step is complete: what its rows sampled, which is in the slots by now, and what it took, if known."""
        if self._config is None:
            return
        tried = plan.width > 1
        if seconds is not None:
            self._seconds[tried].append(seconds)
        if tried:
            self._count(token_ids.reshape(-1, plan.width))
        elif plan.is_decode and len(plan.slots) <= self._config.disable_by_batch_size:
            row = plan.step_id % len(plan.slots)
            if token_ids[row] >= 0 and (repeated := self._config.looked_up) is not None:
                self._look_up(int(plan.slots[row]), *repeated)

    def _decide(self, most: int) -> None:
        if self._tries:
            fails = len(self._tokens) >= _FEWEST and self._mean(self._tokens) <= self._cost
            if fails or self._num_tried >= _TRUSTED:
                # What was to pay and did not soon does not again: it is left the longer the oftener.
                self._patience = min(2 * self._patience, _MOST_PATIENCE) if self._num_tried < _LASTING else _FEWEST
                self._tries, self._num_tried, self._num_plain = False, 0, 0
                self._hits.clear()
        elif self._num_plain >= self._patience and len(self._hits) >= _FEWEST:
            if self._num_plain >= _MOST_PATIENCE:
                self._seconds[True].clear()
            share = self._mean(self._hits)
            if sum(share**count for count in range(most + 1)) > self._cost:
                self._tries = True
                self._tokens.clear()

    def _count(self, token_ids: NDArray[np.int32]) -> None:
        """Of a step that tried: a line for each request."""
        kept, tried = (token_ids >= 0).sum(1), (token_ids[:, 1:] != _NOTHING).sum(1)
        self._counters.trials += int((tried > 0).sum())
        self._counters.guesses += int(tried.sum())
        self._counters.right_guesses += int((kept[kept > 0] - 1).sum())
        if (kept > 0).any():
            self._tokens.append(float(kept[kept > 0].mean()))

    def _look_up(self, slot: int, shortest: int, longest: int) -> None:
        """Whether the newest token of a slot would have been guessed."""
        slots = self._slots
        if slots.alive[slot] and not slots.constrained[slot]:
            tokens = slots.tokens[slot, : slots.known[slot]]
            guessed = follows(tokens[:-1], shortest, longest)
            self._hits.append(guessed == int(tokens[-1]))

    @property
    def _cost(self) -> float:
        """Of a step that tries, in plain ones: no less than one, whatever was measured while some stood still."""
        trying, plain = self._seconds[True], self._seconds[False]
        if len(trying) < _FEWEST or len(plain) < _FEWEST:
            return _SUPPOSED_COST
        return max(1.0, self._mean(trying) / max(self._mean(plain), 1e-9))

    @staticmethod
    def _mean(numbers: "deque[float] | deque[bool]") -> float:
        return sum(numbers) / len(numbers)


def follows(tokens: NDArray[np.int32], shortest: int, longest: int) -> int | None:
    """What followed where the last tokens have been before: the longest run of them, of those the latest. As workers
    look it up (`guess.py`)."""
    length = len(tokens)
    ends = 1 + np.flatnonzero(tokens[: length - 1] == tokens[-1]) if length else np.zeros(0, np.intp)
    found = ends if shortest <= 1 else ends[:0]
    for count in range(2, min(longest, length - 1) + 1):
        ends = ends[ends >= count]
        ends = ends[tokens[ends - count] == tokens[length - count]]
        if not len(ends):
            break
        if count >= shortest:
            found = ends
    return int(tokens[found[-1]]) if len(found) else None
