"""Staying awake for what is about to come: a process that is asleep takes as long to wake as its own work takes.

For short times only, where cores are plenty. While it waits so, a thread takes a core and, between two looks, the
interpreter: it is for processes that have nothing else to do. Knows clocks and selectors; when to begin is its user's
matter.
"""

import math
import selectors
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Vigil:
    """For one thread."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long one lasts at most; 0: there never is one."""
        self._seconds = seconds
        self._until = 0.0

    def begin(self) -> None:
        """Something has been asked for: it should come soon."""
        if self._seconds:
            self._until = time.monotonic() + self._seconds

    def end(self) -> None:
        """It is there."""
        self._until = 0.0

    def wait(self, look: Callable[[float | None], Result], timeout: float | None) -> Result:
        """What `look(timeout)` finds, which may wait so long; during the vigil it is asked without waiting."""
        if self._until and timeout != 0:
            ends = math.inf if timeout is None else time.monotonic() + timeout
            while time.monotonic() < min(self._until, ends):
                if found := look(0):
                    return found
            if timeout is not None:
                timeout = max(0.0, ends - time.monotonic())
        return look(timeout)


class VigilantSelector(selectors.DefaultSelector):
    """For an event loop that stays awake."""

    def __init__(self, vigil: Vigil) -> None:
        super().__init__()
        self._vigil = vigil

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        """As a selector does."""
        return self._vigil.wait(super().select, timeout)
