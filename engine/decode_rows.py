"""Which slots the next plan decodes, and for how many steps: each has pages for them, or somebody is preempted. Pure.

As `admission.py` does for prompts; how much room there is, `Residents` knows.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from tercet.engine.constraints import Constraints
from tercet.engine.guessing import Guessing
from tercet.engine.lease import Lease
from tercet.engine.plan_draft import PlanDraft
from tercet.engine.request import Request
from tercet.engine.residents import Residents


class DecodeRows:
    """Of all plans."""

    def __init__(
        self,
        residents: Residents,
        constraints: Constraints,
        lease: Lease,
        guessing: Guessing,
        preempt: Callable[[Request], None],
    ) -> None:
        """`preempt`: it leaves its slot and comes back later."""
        self._residents = residents
        self._slots = residents.slots
        self._constraints = constraints
        self._lease = lease
        self._guessing = guessing
        self._preempt = preempt

    def plan(self, draft: PlanDraft, *, prompts_wait: bool, in_flight: bool) -> tuple[NDArray[np.int32], int, int]:
        """Slots that decode, for how many steps, with how many guesses: there is room for all of it. `in_flight`: there
        are plans, whose pages come."""
        slots, count, guesses = self._plan(draft, prompts_wait=prompts_wait, in_flight=in_flight)
        if not len(slots) and not in_flight:  # what preemption freed, if anything, is there at once
            return self._plan(draft, prompts_wait=prompts_wait, in_flight=in_flight)
        return slots, count, guesses

    def _plan(self, draft: PlanDraft, *, prompts_wait: bool, in_flight: bool) -> tuple[NDArray[np.int32], int, int]:
        if not self._residents.running:
            return np.zeros(0, np.int32), 1, 0
        # A row that is computed and draws nothing is computed again, which a state cannot be.
        ahead = not self._residents.states.tile and self._constraints.go_ahead(self._slots, self._lease.step_seconds)
        slots = self._slots.that_decode(ahead=ahead)
        if not len(slots):
            return slots, 1, 0
        count = 1
        guesses = 0 if prompts_wait else self._guessing.wanted(slots)
        if not (prompts_wait or self._slots.any_constrained):
            count = min(self._lease.steps, self._slots.longest_lease(slots))
        wanted, lacking = self._slots.growth(slots, count * (1 + guesses))
        can_wait = count > 1 or guesses > 0
        if can_wait and len(lacking) and self._residents.lacks_pages(slots[lacking], wanted[lacking]):
            count, guesses = 1, 0  # nobody is sent away for steps that can wait
            wanted, lacking = self._slots.growth(slots, count)
        if not len(lacking):
            return slots, count, guesses
        without: dict[int, int] = {}
        for row in lacking.tolist():
            request = self._residents.at(slots[row])
            assert request is not None
            if lack := self._residents.grow(request, int(wanted[row]), draft):
                without[request.slot] = lack
        if without:
            self._make_room(without, in_flight=in_flight)
            draft.drop_pages(lambda row: not self._slots.alive[self._residents.tables.slot_of(row)])
            slots = slots[self._slots.alive[slots] & ~np.isin(slots, list(without))]
        return slots, count, guesses

    def _make_room(self, lacking: Mapping[int, int], *, in_flight: bool) -> None:
        """Preempt the youngest of the least urgent until the pages that slots lack are there, or after this flight.

        Their pages are taken away; they are computed again later, and nobody will see a difference.
        """
        coming, running, shortage = self._residents.num_coming_pages, self._residents.running, sum(lacking.values())
        while shortage > self._residents.num_available + coming and len(running) > 1:
            victim = max(running.values(), key=lambda request: (request.priority, request.number))
            shortage -= lacking.get(victim.slot, 0)
            if in_flight:
                coming += self._residents.tables.num_given_back(victim.tables)
            self._preempt(victim)
