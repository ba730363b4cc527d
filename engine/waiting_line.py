"""Who waits for a slot, in the order of being served: suspects first, then by priority, then by age. Pure.

It knows requests and a clock's readings; it knows no pages and no plans.
"""

from bisect import insort
from collections.abc import Callable, Iterator

from tercet.engine.request import Request


class WaitingLine:
    """A queue that stays sorted. A request that comes back takes the place its age gives it."""

    def __init__(self) -> None:
        self._line: list[Request] = []
        self.num_tokens = 0
        """Tokens that those in line will have to compute."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    @property
    def first(self) -> Request:
        return self._line[0]

    def add(self, request: Request) -> None:
        insort(self._line, request, key=_turn)
        self.num_tokens += len(request.token_ids)

    def pop(self) -> Request:
        """The first leaves the line."""
        request = self._line.pop(0)
        self.num_tokens -= len(request.token_ids)
        return request

    def remove_if(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """These leave the line, and are returned."""
        removed = [request for request in self._line if unwanted(request)]
        if removed:
            self._line = [request for request in self._line if not unwanted(request)]
            self.num_tokens -= sum(len(request.token_ids) for request in removed)
        return removed


def _turn(request: Request) -> tuple[bool, int, int]:
    return not request.is_suspect, request.priority, request.number
