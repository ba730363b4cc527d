"""Parts of prompts that one plan computes, within a budget of tokens. Pure.

It knows how far each prompt is; who gets a part, and in what order, is the planner's matter.
"""

from tercet.engine.plan_draft import PlanDraft
from tercet.engine.request import Request
from tercet.engine.residents import Residents


class ChunkPlan:
    """The chunks of one plan in the making."""

    def __init__(self, residents: Residents, budget: int, draft: PlanDraft) -> None:
        self._residents = residents
        self._slots = residents.slots
        self.budget = budget
        """Tokens that the plan can still take."""
        self._draft = draft

    def num_to_come(self, request: Request) -> int:
        """Tokens of its prompt that no plan computes yet."""
        return len(request.token_ids) - int(self._slots.planned[request.slot])

    def can_begin(self, request: Request) -> bool:
        """Whether there is budget for a part of one that is new, whatever of it is cached."""
        of_images = self._residents.image_tokens if request.images else 0
        return self.budget >= min(max(self._residents.states.tile, of_images, 1), len(request.token_ids))

    def take(self, request: Request, *, others_wait: bool = False) -> None:
        """As much of its prompt as there is budget and room; half of that if others wait and it does not fit."""
        slot, start, to_come = request.slot, int(self._slots.planned[request.slot]), self.num_to_come(request)
        most = min(self.budget, self._residents.room(request, start))
        length = min(to_come, most)
        if length < to_come and others_wait:
            length = min(max(self.budget // 2, 1), most)
        if self._residents.states.tile:
            length = self._within_cuts(request, start, length, most)
        if self._residents.image_tokens and request.images:
            length = self._beside_images(request, start, length, most)
        if not length:
            return
        lacking = self._residents.grow(request, start + length, self._draft)
        assert not lacking, "there was room"
        self._draft.chunks.append((slot, start, length))
        self.budget -= length
        self._slots.planned[slot] += length
        if length == to_come:
            self._residents.prefilling.remove(request)
            self._slots.decoding[slot] = True

    def _within_cuts(self, request: Request, start: int, length: int, most: int) -> int:
        """Less of it, up to where its state is kept, and so that the next part begins with a tile; where that leaves
        nothing, one tile, if that is not too much."""
        tile, total = self._residents.states.tile, len(request.token_ids)
        end = min(start + length, next((cut for cut in request.cuts if cut > start), total))
        if end < total:
            end = max(end // tile * tile, min(start + tile, total))
        return end - start if end - start <= most else 0

    def _beside_images(self, request: Request, start: int, length: int, most: int) -> int:
        """Less of it, up to an image that would be cut; where that leaves nothing, all of the image, if that is not too
        much."""
        for image in request.images:
            first, stop = image.first, image.first + image.num_tokens
            if first < start + length < stop:
                end = first if first > start else stop
                return end - start if end - start <= most else 0
        return length
