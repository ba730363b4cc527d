"""Requests with a grammar: what they may sample next is asked for, waited for, and goes into the plans. Pure.

Between the planner, which knows slots, and whoever computes masks from token ids. A request is admitted when its first
mask is there. Its next steps are planned ahead of their masks where these can be expected before the draw; how long
that waits for them is the matter of `pending_draw.py`. Without such requests it does nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.engine.grammar_link import Followed
from tercet.engine.request import Request
from tercet.engine.slot_arrays import SlotArrays
from tercet.ipc.grammar_messages import Allowed, Disallowed

_FIRST_DELAY = 0.001
"""What masks are taken to need before any has come."""
_MARGIN = 3
"""In a step nearly all masks come within so many times their mean, and workers have them."""
_PATIENCE = 0.25
"""Of a step."""
_SHORTEST = 0.001
"""Nobody waits for less than a millisecond and is on time."""
_MEMORY = 16
"""Masks that count in their mean, about."""


class MaskSource(Protocol):
    """As `GrammarCrew`."""

    @property
    def mask_table(self) -> str: ...
    def follow(self, grammar: str, token_ids: Sequence[int]) -> Followed: ...
    def extend(self, answers: Iterable[tuple[Followed, int]]) -> None: ...
    def release(self, followed: Followed) -> None: ...
    def take(self, message: Allowed | Disallowed) -> list[Followed]: ...
    def check(self) -> list[Followed]: ...


class Constraints:
    """Of all requests, by their numbers."""

    def __init__(self, source: MaskSource | None, most: int) -> None:
        """At most `most` requests are followed at a time. Without `source` none may have a grammar."""
        self._source = source
        self._most = most
        self._followed: dict[int, Followed] = {}
        self._requests: dict[Followed, Request] = {}
        self._delay = _FIRST_DELAY
        """Seconds that the last masks took, in the mean."""

    def has_room_for(self, request: Request) -> bool:
        """Whether it is asked about already, or can be before some have ended."""
        return len(self._followed) < self._most or request.number in self._followed

    @property
    def last_waiting(self) -> Request | None:
        """Of those that are asked about and have no slot yet, the one whose turn comes last."""
        waiting = (request for request in self._requests.values() if request.slot < 0)
        return max(waiting, key=lambda request: request.turn, default=None)

    def lets_in(self, request: Request) -> bool:
        """Whether it may take a slot: it has no grammar, or a mask for its first step."""
        if request.sampling.grammar is None:
            return True
        followed = self._followed.get(request.number)
        return followed is not None and followed.has_mask

    def begin(self, request: Request) -> None:
        """Ask for its first mask, unless that has been done."""
        if request.number in self._followed:
            return
        assert self._source is not None, "a request has a grammar, and there is no tokenizer to read it with"
        assert request.sampling.grammar is not None
        generated = request.token_ids[request.num_prompt :].tolist()
        followed = self._source.follow(request.sampling.grammar, generated)
        self._followed[request.number], self._requests[followed] = followed, request

    def end(self, number: int) -> None:
        """It has ended, or begins again later."""
        followed = self._followed.pop(number, None)
        if followed is not None and self._source is not None:
            del self._requests[followed]
            self._source.release(followed)

    def end_all(self) -> None:
        """All begin again."""
        for number in list(self._followed):
            self.end(number)

    def accept(self, arrays: SlotArrays, slots: NDArray[np.int32], token_ids: NDArray[np.int32], now: float) -> None:
        """What these slots sampled."""
        if not self._followed or self._source is None:
            return
        rows = np.flatnonzero(arrays.constrained[slots] & arrays.alive[slots])
        if not len(rows):
            return
        arrays.lacks_mask[slots[rows]] = True
        arrays.asked_at[slots[rows]], arrays.times_late[slots[rows]] = now, 0
        numbers = arrays.number[slots[rows]].tolist()
        followed = [self._followed[number] for number in numbers]
        self._source.extend(zip(followed, token_ids[rows].tolist(), strict=True))

    def go_ahead(self, arrays: SlotArrays, step: float) -> bool:
        """Whether to plan ahead of masks, where a step takes so many seconds.

        A draw that waits for masks keeps other rows waiting, too: so not where it might have to, unless all want one.
        """
        return bool(self._followed) and (_MARGIN * self._delay < step or arrays.all_constrained)

    def worth_waiting(self, arrays: SlotArrays, step: float) -> float:
        """Until when a plan with prompts, which goes ahead of no mask, should wait for those that are computed, while
        the device has a plan of `step` seconds: else their rows are in each third such plan only."""
        lacking = arrays.lacks_mask & arrays.decoding
        patience = step * _PATIENCE
        if not self._followed or not max(self._delay, _SHORTEST) < patience or not lacking.any():
            return 0.0
        return float(arrays.asked_at[lacking].max()) + patience

    def take(self, message: Allowed | Disallowed) -> list[tuple[Request, str | None]]:
        """Whose mask is there by now; those that will get none, with the reason."""
        return [] if self._source is None else self._news(self._source.take(message))

    def note_delays(self, seconds: NDArray[np.float64]) -> None:
        """What the masks took that came just now."""
        weight = len(seconds) / (len(seconds) + _MEMORY)
        self._delay += weight * (float(seconds.mean()) - self._delay)

    def check(self) -> list[tuple[Request, str | None]]:
        """See that masks are still being computed; call it now and then."""
        return [] if self._source is None else self._news(self._source.check())

    def _news(self, answered: list[Followed]) -> list[tuple[Request, str | None]]:
        return [(self._requests[followed], followed.failure) for followed in answered]

    def masks(self, arrays: SlotArrays, slots: NDArray[np.int32]) -> tuple[bytes, str]:
        """Of these slots, which sample, every one whose mask is to be had, and where it is, as messages say it."""
        if not self._followed or self._source is None:
            return b"", ""
        slots = slots[arrays.constrained[slots] & ~arrays.lacks_mask[slots]]
        rows = np.array([self._use_mask(number) for number in arrays.number[slots].tolist()], np.int32)
        return np.stack([slots, rows], 1).tobytes(), self._source.mask_table if len(slots) else ""

    def _use_mask(self, number: int) -> int:
        followed = self._followed[number]
        assert followed.has_mask, "a row is planned without its mask"
        followed.has_mask = False
        return followed.row
