"""Requests with a grammar: what they may sample next is asked for, waited for, and goes into the plans. Pure.

Between the planner, which knows slots, and whoever computes masks from token ids. A request is admitted when its first
mask is there, and is in no plan while its next one is not; the others do not wait for it. Without such requests it does
nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.engine.grammar_link import Followed
from tercet.engine.request import Request
from tercet.engine.slot_arrays import SlotArrays
from tercet.ipc.step_messages import Allowed, Disallowed

_SHORTEST_PATIENCE = 0.001
_LONGEST_PATIENCE = 0.005
_FORGETS = 0.9
"""What a longer delay of before counts for when the next masks come."""
_SHY = 8


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
        self._patient_until = 0.0
        self._asked_at = 0.0
        """Of those that run."""
        self._delay = 0.0
        """Seconds that their last masks took, slow ones for a while longer."""
        self._held_until: float | None = None

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

    def accept(
        self, arrays: SlotArrays, slots: NDArray[np.int32], token_ids: NDArray[np.int32], now: float, spare: float
    ) -> None:
        """What these slots sampled; who ended with it has left already. The next plan has `spare` seconds' time."""
        if not self._followed or self._source is None:
            return
        rows = np.flatnonzero(arrays.constrained[slots] & arrays.alive[slots])
        if not len(rows):
            return
        arrays.lacks_mask[slots[rows]] = True
        numbers = arrays.number[slots[rows]].tolist()
        followed = [self._followed[number] for number in numbers]
        self._source.extend(zip(followed, token_ids[rows].tolist(), strict=True))
        self._asked_at = now
        if spare >= _SHORTEST_PATIENCE:
            self._patient_until = now + min(spare, _LONGEST_PATIENCE)

    def patience(self, arrays: SlotArrays, now: float) -> float:
        """Seconds for which it is good to wait for masks that may come in time for the next plan."""
        return self._patient_until - now if self._patient_until > now and arrays.any_lacks_mask else 0.0

    def hold(self, arrays: SlotArrays, now: float, step: float) -> float:
        """Seconds for which rows whose masks are there should wait for the others, where nothing else is to be done.

        A large model's step takes as long for half of the rows as for all: two halves that take turns would get half
        as many tokens. Not where masks take as long as a step (of `step` seconds): then they are what all wait for.
        """
        here, all_of_them = arrays.readiness() if self._followed else (0, 0)
        if not 0 < here < all_of_them or self._delay >= step:
            self._held_until = None
            return 0.0
        if self._held_until is None:
            self._held_until = now + step + 2 * self._delay
        elif now >= self._held_until:  # in vain: not again soon
            self._delay = _SHY * step
        return max(0.0, self._held_until - now)

    def take(self, message: Allowed | Disallowed, now: float) -> list[tuple[Request, str | None]]:
        """Whose mask is there by now; those that will get none, with the reason."""
        news = [] if self._source is None else self._news(self._source.take(message))
        if any(request.slot >= 0 for request, _ in news):  # not of those alone that have yet to begin
            self._delay = max(now - self._asked_at, _FORGETS * self._delay)
        return news

    def check(self) -> list[tuple[Request, str | None]]:
        """See that masks are still being computed; call it now and then."""
        return [] if self._source is None else self._news(self._source.check())

    def _news(self, answered: list[Followed]) -> list[tuple[Request, str | None]]:
        return [(self._requests[followed], followed.failure) for followed in answered]

    def masks(
        self, arrays: SlotArrays, decodes: NDArray[np.int32], chunks: list[tuple[int, int, int]]
    ) -> tuple[bytes, str]:
        """Every slot with a grammar that samples in a plan of these rows, and where its mask is, as plans say it."""
        if not self._followed or self._source is None:
            return b"", ""
        sampling = np.array([slot for slot, _, _ in chunks if arrays.decoding[slot]], np.int32)
        slots = np.concatenate([decodes, sampling])
        slots = slots[arrays.constrained[slots]]
        rows = np.array([self._use_mask(number) for number in arrays.number[slots].tolist()], np.int32)
        return np.stack([slots, rows], 1).tobytes(), self._source.mask_table if len(slots) else ""

    def _use_mask(self, number: int) -> int:
        followed = self._followed[number]
        assert followed.has_mask, "a row is planned without its mask"
        followed.has_mask = False
        return followed.row
