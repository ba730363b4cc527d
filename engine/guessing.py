"""When it pays to try tokens ahead of those that are sampled. Pure: no clock but the argument `now`.

A step that tries some takes longer than a plain one, and gives a request more tokens the more of them were right. Both
are watched, over and over: what a request says next may be quite unlike what it has said.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from tercet.engine.plan_draft import InFlight
from tercet.engine.residents import Counters
from tercet.engine.speculation import SpeculativeConfig

_STEPS = 16
"""Of each kind, by whose mean it is judged."""
_FIRST = 8
"""Steps that try, before it is judged what comes of it."""
_PLAIN, _AGAIN = 48, 4
"""Plain steps where it does not pay, and those behind them that try again."""
_NOTHING = -1
"""Of a row that tried nothing; less than that: of one that was behind a wrong guess."""
_TRUSTED = 400
"""Steps that try, after which a few plain ones are measured again."""


class Guessing:
    """Watches all steps."""

    def __init__(self, config: SpeculativeConfig | None, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._seconds = {True: deque[float](maxlen=_STEPS), False: deque[float](maxlen=_STEPS)}
        """Of steps that try, and of plain ones."""
        self._tokens: deque[float] = deque(maxlen=_STEPS)
        """Of a request in a step that tries, on average."""
        self._last: float | None = None
        """When the step before was complete, if the next one followed it at once."""
        self._num_to_try, self._num_plain = _FIRST, 0
        self._since_plain = _TRUSTED
        """Steps that tried since plain ones were measured."""

    def wanted(self, may_guess: NDArray[np.bool_]) -> int:
        """Guesses of each row of the next plan, of which these say whether they may."""
        if self._config is None or len(may_guess) > self._config.disable_by_batch_size or not may_guess.all():
            return 0
        if self._num_plain > 0:
            self._num_plain -= 1
            return 0
        if self._num_to_try <= 0:
            if self._since_plain >= _TRUSTED:
                self._num_plain, self._since_plain = _AGAIN - 1, 0
                return 0
            if not self._pays:
                self._num_plain, self._num_to_try = _PLAIN - 1, _AGAIN
                self._tokens.clear()
                return 0
        self._num_to_try -= 1
        self._since_plain += 1
        return self._config.num_speculative_tokens

    def _begin(self) -> None:
        """A request has entered, and what it says is new."""
        self._num_plain, self._num_to_try = 0, max(self._num_to_try, _AGAIN)

    def completed(self, now: float, plan: InFlight, token_ids: NDArray[np.int32], *, more_in_flight: bool) -> None:
        """A step is complete: what its rows sampled."""
        if self._config is None:
            return
        if self._last is not None and plan.is_decode:
            self._seconds[plan.width > 1].append(now - self._last)
        self._last = now if more_in_flight else None
        if not plan.is_decode:
            self._begin()
        if plan.width == 1:
            return
        ids = token_ids.reshape(-1, plan.width)
        counts = (ids >= 0).sum(1)
        tried = (ids[:, 1:] != _NOTHING).sum(1)
        self._counters.trials += int((tried > 0).sum())
        self._counters.guesses += int(tried.sum())
        self._counters.right_guesses += int((counts[counts > 0] - 1).sum())
        if (counts > 0).any():
            self._tokens.append(float(counts[counts > 0].mean()))

    @property
    def _pays(self) -> bool:
        trying, plain = self._seconds[True], self._seconds[False]
        if not (trying and plain and self._tokens):
            return True
        cost = (sum(trying) / len(trying)) / max(sum(plain) / len(plain), 1e-9)
        return sum(self._tokens) / len(self._tokens) > cost
