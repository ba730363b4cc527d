"""Parts of prompts that one plan computes, within a budget of tokens. Pure.

It knows how far each prompt is; who gets a part, and in what order, is the planner's matter.
"""

from tercet.engine.request import Request
from tercet.engine.residents import Residents


class ChunkPlan:
    """The chunks of one plan in the making."""

    def __init__(self, residents: Residents, budget: int, chunks: list[tuple[int, int, int]]) -> None:
        self._residents = residents
        self._slots = residents.slots
        self.budget = budget
        """Tokens that the plan can still take."""
        self._chunks = chunks
        """Slot, first position, length."""

    def num_to_come(self, request: Request) -> int:
        """Tokens of its prompt that no plan computes yet."""
        return len(request.token_ids) - int(self._slots.planned[request.slot])

    def take(self, request: Request, *, others_wait: bool = False) -> None:
        """As much of its prompt as there is budget; half of that if others wait and it does not fit."""
        slot, to_come = request.slot, self.num_to_come(request)
        length = min(to_come, self.budget)
        if length < to_come and others_wait:
            length = max(self.budget // 2, 1)
        if not length:
            return
        self._chunks.append((slot, int(self._slots.planned[slot]), length))
        self.budget -= length
        self._slots.planned[slot] += length
        if length == to_come:
            self._residents.prefilling.remove(request)
            self._slots.decoding[slot] = True
