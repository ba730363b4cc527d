"""News in turn: readers of first tokens go ahead of those whose answers have begun, by some turns of the event loop.

A reader that is several tasks away, as behind an HTTP door, needs a turn of the loop for each; without a head start its
first token is in line again, at each of them, behind the work that the whole step makes for everybody else. Knows the
order; what an item is, and who reads it, others know.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class HeadStart(Generic[Item]):
    """For one loop's thread."""

    def __init__(
        self,
        take: Callable[[Item], None],
        split: Callable[[Sequence[Item]], tuple[Sequence[Item], Sequence[Item]]],
        turns: int,
    ) -> None:
        """`take` hands an item to its reader. `split` tells those of first tokens from the others, in order; all that
        a reader gets at once goes together. `turns`: 0 for readers that wait for nothing in between.
        """
        self._take = take
        self._split = split
        self._turns = turns
        self._held: Sequence[Item] = ()

    def deliver(self, items: Sequence[Item]) -> None:
        """All that has come at once: first tokens now, the others now too, or after the turns."""
        if self._held:
            self.flush()
        first, self._held = self._split(items)
        for item in first:
            self._take(item)
        if self._turns and first and self._held:
            self._count_down(self._held, self._turns)
        else:
            self.flush()

    def flush(self) -> None:
        """Nothing is held any longer: whatever comes next was said later."""
        held, self._held = self._held, ()
        for item in held:
            self._take(item)

    def _count_down(self, held: Sequence[Item], turns: int) -> None:
        if held is not self._held:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._count_down, held, turns - 1)
        else:
            self.flush()
