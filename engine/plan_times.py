"""When it is time to plan, and when to draw. Pure: no clock but the argument `now`.

It knows what is in flight and who waits for what; what a plan computes is the matter of `planner.py`.
"""

from collections import deque

from tercet.engine.constraints import Constraints
from tercet.engine.lease import Lease
from tercet.engine.pending_draw import PendingDraw
from tercet.engine.plan_draft import InFlight
from tercet.engine.residents import Residents
from tercet.engine.waiting_line import WaitingLine
from tercet.ipc.step_messages import Draw

_FEW = 8
"""Answers for which a device may wait: more keep it busy."""


class PlanTimes:
    """Of all plans."""

    def __init__(
        self,
        in_flight: deque[InFlight],
        pending: PendingDraw,
        lease: Lease,
        constraints: Constraints,
        waiting: WaitingLine,
        residents: Residents,
    ) -> None:
        self._in_flight = in_flight
        self._pending = pending
        self._lease = lease
        self._constraints = constraints
        self._waiting = waiting
        self._residents = residents

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for a slot, for a prompt to be computed, or, token by token, for what a grammar allows."""
        token_by_token = self._residents.slots.any_constrained and len(self._residents.running) <= _FEW
        awaited = bool(self._waiting or self._residents.prefilling or token_by_token)
        return awaited or any(not plan.is_decode for plan in self._in_flight)

    def draw(self, now: float) -> Draw | None:
        """The rest of the last plan, if that awaits masks and it is time; or some of them ahead of it."""
        return self._pending.take(now, prompts_come=self._prompts_come) if len(self._in_flight) == 1 else None

    def wakes_at(self, now: float) -> float | None:
        """When it is time to draw or to plan, if nothing happens before."""
        if not self._pending:
            return self.waits_until(now)
        return self._pending.due(prompts_come=self._prompts_come) if len(self._in_flight) == 1 else None

    def waits_until(self, now: float) -> float | None:
        """When planning goes on, if it waits for more prompts, or with prompts for masks."""
        if not self._in_flight:
            return None
        if self._prompts_come:
            until = self._constraints.worth_waiting(self._residents.slots, self._lease.step_seconds)
            return until if until > now else None
        patience = 0.0 if self._waiting else self._lease.patience(now)
        return now + patience if patience else None

    @property
    def _prompts_come(self) -> bool:
        """Whether the next plan may have some to compute."""
        return bool(self._residents.prefilling or (self._waiting.anybody and self._residents.num_free_slots))
