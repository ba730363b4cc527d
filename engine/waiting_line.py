"""Who waits for a slot, in the order of being served: suspects first, then by priority, then by age. Pure.

The line is bounded, by requests and by tokens: past that it is kinder to say no at once. It knows no pages and no
plans.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter

from msgspec import structs

from tercet.engine.planner_settings import PlannerSettings
from tercet.engine.request import Family, Request
from tercet.ipc.step_messages import Submit, Unservable

_LONGEST_HINT_S = 60.0
_SMOOTHING = 0.1
_TURN = attrgetter("turn")


class WaitingLine:
    """A queue that is sorted for whoever looks. A request that comes back takes the place its age gives it."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._max_requests = settings.max_queued_requests
        self._max_tokens = settings.max_queued_tokens
        self._num_slots = settings.max_num_seqs
        self._line: list[Request] = []
        self._is_sorted = True
        self._aside: dict[Family | None, dict[int, Request]] = {}
        """They wait for one of their family to compute the prompt, for a mask, or for pages, and hold nobody up
        meanwhile. By number."""
        self.num_tokens = 0
        """Tokens that those in line will have to compute."""
        self._last_pop, self._num_popped = -math.inf, 0
        """When requests left the line last, and how many at that time."""
        self._left_some = False
        """Whether others had to wait then."""
        self._seconds_a_pop = 0.0
        """How fast the line moves, smoothed."""

    def __len__(self) -> int:
        return len(self._line) + sum(map(len, self._aside.values()))

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._line, *chain.from_iterable(aside.values() for aside in self._aside.values())])

    @property
    def anybody(self) -> bool:
        """Whether somebody could take a slot at once, if there is one."""
        return bool(self._line)

    @property
    def first(self) -> Request | None:
        """Whose turn it is. Those of a family that does better to wait are passed over."""
        line = self._in_order()
        while line and (family := line[0].family) is not None and family.waits:
            self.set_aside(line[0])
        return line[0] if line else None

    def set_aside(self, request: Request) -> None:
        """Not yet: the next has its turn. Until `bring_back`."""
        self._line.remove(request)
        self._aside.setdefault(request.family, {})[request.number] = request

    def bring_back(self, request: Request) -> None:
        """It takes the place again that its age gives it, if it is still aside."""
        if self._take_from_aside(request):
            insort(self._in_order(), request, key=_TURN)

    def call_back(self, family: Family | None) -> None:
        """These need not wait any longer, but for their turn."""
        if family is not None and (back := self._aside.pop(family, None)):
            self._line += back.values()
            self._is_sorted = False

    def add(self, request: Request) -> None:
        insort(self._in_order(), request, key=_TURN)
        self.num_tokens += request.num_to_compute

    def pop(self, now: float) -> Request:
        """The first leaves the line."""
        if now != self._last_pop:  # else it is one of a wave
            if self._left_some:
                weight = 1 - (1 - _SMOOTHING) ** self._num_popped
                self._seconds_a_pop += weight * ((now - self._last_pop) / self._num_popped - self._seconds_a_pop)
            self._last_pop, self._num_popped = now, 0
        request = self._in_order().pop(0)
        self.num_tokens -= request.num_to_compute
        request.expires = math.inf
        self._num_popped += 1
        self._left_some = bool(self._line)
        return request

    def is_full(self, message: Submit, num_free_slots: int) -> Unservable | None:
        """Why this one cannot join, if it cannot: those that find a slot at once are not counted. Siblings count."""
        if (most := self._max_requests + self._num_slots) <= len(message.siblings):
            text = f"n is {len(message.siblings) + 1}; want at most {most}: --max-num-seqs and --max-queued-requests"
            return Unservable(message.number, "invalid_request", text)
        num_tokens = len(message.prompt_ids) // 4 + len(message.siblings)
        too_many = len(self) + len(message.siblings) >= self._max_requests + num_free_slots
        too_much = bool(self) and self.num_tokens + num_tokens > self._max_tokens
        if not (too_many or too_much):
            return None
        hint = min(max(1.0, self._seconds_a_pop * len(self) / 10), _LONGEST_HINT_S)  # a tenth of the line
        text = (
            f"{len(self)} requests with {self.num_tokens} tokens wait already (--max-queued-requests is "
            f"{self._max_requests}, --max-queued-tokens {self._max_tokens}); ask again in {hint:.0f} s"
        )
        return Unservable(message.number, "overloaded", text, round(hint, 1))

    def remove_if(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """These leave the line, and are returned."""
        removed = [request for request in self if unwanted(request)]
        if removed:
            self._line = [request for request in self._line if not unwanted(request)]
            for request in removed:
                self._take_from_aside(request)
            self.num_tokens -= sum(request.num_to_compute for request in removed)
        return removed

    def expire(self, now: float) -> list[Unservable]:
        """Those that have waited for as long as they were willing to leave the line."""
        expired = self.remove_if(lambda request: request.has_expired(now))
        text = "the request waited for its turn for queue_timeout, {:g} s"
        return [Unservable(one.number, "timed_out", text.format(one.queue_timeout)) for one in expired]

    def _in_order(self) -> list[Request]:
        """The line, sorted once for all families that one plan calls back: a look at everybody takes long."""
        if not self._is_sorted:
            self._line.sort(key=_TURN)
            self._is_sorted = True
        return self._line

    def _take_from_aside(self, request: Request) -> bool:
        """Whether it was there."""
        family = self._aside.get(request.family, {})
        if family.pop(request.number, None) is None:
            return False
        if not family:
            del self._aside[request.family]
        return True


def make_fit(request: Request, settings: PlannerSettings) -> Unservable | None:
    """Why it can never run, if it cannot. One that was to take all the room there is takes what there is now."""
    needed = request.max_length - 1  # the last token's K and V are never wanted
    available = settings.need.most_tokens(settings.num_pages - 1, max(needed, settings.max_model_len))
    if needed <= available:
        return None
    sampling, most = request.sampling, available + 1 - request.num_prompt
    if sampling.open_ended and most > max(request.num_generated, sampling.min_tokens - 1):
        request.sampling = structs.replace(sampling, max_tokens=most)
        return None
    return Unservable(
        request.number,
        "too_long_for_cache",
        f"prompt ({request.num_prompt} tokens) and max_tokens ({request.sampling.max_tokens}) need "
        f"{needed} tokens of KV cache; want at most {available}, all that --kv-cache-memory allows",
    )
