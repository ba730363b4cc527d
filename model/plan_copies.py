"""The copies that a plan wants made before its step: of pages that two answers part on, of states that are kept.

Knows how pairs get to the device; whose pages and places they are is the scheduler's matter.
"""

import numpy as np
from torch import Tensor

from tercet.ipc.step_messages import Step
from tercet.model.kv_cache import KvCache
from tercet.model.slots import PlanBuffer
from tercet.model.states import States
from tercet.triton_kernels.copy_pages import copy_pages


class PlanCopies:
    """Of one runner."""

    def __init__(self, plan: PlanBuffer, first_word: int, kv_cache: KvCache, states: States | None) -> None:
        """`first_word`: from which on a run of the plan's words may bring pairs."""
        self._plan, self._first_word = plan, first_word
        self._kv_cache, self._states = kv_cache, states

    def make(self, step: Step) -> None:
        """All of a plan's. What is kept in it may be what another request begins from."""
        if len(step.copies):
            self._copy_pages(self._sent(step.copies))
        for pairs in (step.kept, step.restored):
            if len(pairs) and self._states is not None:
                self._states.copy(self._sent(pairs))

    def warm_up(self) -> None:
        """Compile what makes them; copies nothing that anybody holds."""
        pairs_P2 = self._plan.words_W[self._first_word :][:2].view(-1, 2)
        self._copy_pages(pairs_P2)
        if self._states is not None:
            self._states.copy(pairs_P2)

    def _copy_pages(self, pairs_P2: Tensor) -> None:
        for block in self._kv_cache.blocks:
            copy_pages(block, pairs_P2)

    def _sent(self, packed: bytes) -> Tensor:
        pairs = np.frombuffer(packed, np.int32)
        self._plan.put(self._first_word, pairs)
        return self._plan.words_W[self._first_word :][: len(pairs)].view(-1, 2)
