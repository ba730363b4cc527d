"""Whose prompts the next plan computes, and who is admitted to a slot. Pure.

It knows the order of turns; how much room there is, `Residents` knows, and `ChunkPlan` cuts the parts.
"""

from collections.abc import Callable

from tercet.engine.chunk_plan import ChunkPlan
from tercet.engine.constraints import Constraints
from tercet.engine.plan_draft import PlanDraft
from tercet.engine.request import Request
from tercet.engine.residents import Residents
from tercet.engine.waiting_line import WaitingLine


class Admission:
    """From the waiting line to slots."""

    def __init__(
        self, waiting: WaitingLine, residents: Residents, constraints: Constraints, preempt: Callable[[Request], None]
    ) -> None:
        """`preempt`: it leaves its slot and comes back later."""
        self._waiting = waiting
        self._residents = residents
        self._constraints = constraints
        self._preempt = preempt

    def plan_chunks(self, budget: int, draft: PlanDraft, now: float, *, alone: bool) -> None:
        """Parts of prompts for what the decodes leave of the budget.

        The oldest prompt that is begun has half, so that it gets on. Then come those begun that fit, the shortest
        first, then new ones; what is left goes to the long ones. So a short prompt waits for no long one but the first.

        `alone`: nothing else is computed now, so no pages come of themselves. Where prompts that are begun have all and
        want more, the youngest of the least urgent is preempted until another gets on.
        """
        self._residents.states.keep(draft)  # ahead of all who may begin from what is kept
        plan = ChunkPlan(self._residents, budget, draft)
        oldest, others = self._residents.prefilling[:1], sorted(self._residents.prefilling[1:], key=plan.num_to_come)
        for request in oldest:
            plan.take(request, others_wait=bool(others) or self._can_admit(plan))
        while others and plan.budget >= plan.num_to_come(others[0]):
            plan.take(others.pop(0))
        while plan.budget > 0 and self._can_admit(plan):
            request = self._waiting.pop(now)
            self._residents.admit(request, now, draft)
            plan.take(request, others_wait=self._can_admit(plan))
        for request in others:
            plan.take(request)
        while alone and not draft.chunks and len(begun := self._residents.prefilling) > 1:
            self._preempt(max(begun, key=lambda request: (request.priority, request.number)))
            plan.take(begun[0])
        assert draft.chunks or not draft.kept, "a state is kept, and no plan follows"

    def share(self, chunks: list[tuple[int, int, int]]) -> None:
        """What a plan computes of prompts serves later ones, which workers run after it."""
        for slot, start, length in chunks:
            request = self._residents.at(slot)
            assert request is not None
            self._residents.share(request, start + length)
            if request.family is not None and self._residents.slots.decoding[slot]:
                request.family.has_prompt(request)
                self._waiting.call_back(request.family)

    def _can_admit(self, plan: ChunkPlan) -> bool:
        """Whether the next in line can enter."""
        first = self.next_in_line()
        return first is not None and plan.can_begin(first) and self._residents.can_admit(first)

    def next_in_line(self) -> Request | None:
        """Whoever can enter as soon as there is room. Those who have no mask for the first step yet, or for whom pages
        come from the host's memory, let others pass."""
        while (first := self._waiting.first) is not None:
            if self._constraints.lets_in(first):
                if not self._residents.waits_for_pages(first):
                    break
            else:
                if not (self._constraints.has_room_for(first) or self._make_way(first)):
                    return None
                self._constraints.begin(first)
                if first.is_suspect:  # it has to run alone: nobody passes
                    return None
            self._waiting.set_aside(first)
        return first

    def _make_way(self, request: Request) -> bool:
        """Whoever is last in line asks for its mask later, if it is behind this one, who else might wait for ever."""
        last = self._constraints.last_waiting
        if last is None or last.turn < request.turn:
            return False
        self._constraints.end(last.number)
        self._waiting.bring_back(last)
        return True
