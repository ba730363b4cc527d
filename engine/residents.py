"""Who holds a slot and which pages, from admission until the last plan that may name them is complete. Pure.

It knows slots, pages and what they hold; it knows no queue, and makes no plans.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tercet.engine.counters import Counters
from tercet.engine.held_pages import Held
from tercet.engine.page_tables import PageTables
from tercet.engine.plan_draft import PlanDraft
from tercet.engine.planner_settings import PlannerSettings
from tercet.engine.request import Request
from tercet.engine.slot_arrays import SlotArrays, Slots
from tercet.engine.states import States
from tercet.engine.swaps import Swaps
from tercet.ipc.step_messages import Enter, Load


class Head(NamedTuple):
    """The beginning of a request, as far as its keys and values are there already."""

    num_tokens: int
    tables: list[Held]
    """Full pages, to be shared."""
    copied: Sequence[int] = ()
    """The beginnings of these pages, one of each table, belong to it too; what follows there is another's."""
    num_cached: int = 0
    """Tokens whose keys and values are there, though it may have to compute some for the state behind them."""


class Residents:
    """All that workers hold. A new one when workers are new."""

    def __init__(self, settings: PlannerSettings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self.tables = PageTables(settings)
        self.slots = SlotArrays(settings.max_num_seqs, settings.max_model_len)
        self.states = States(settings)
        self.image_tokens = settings.image_tokens
        """0: parts of prompts may end within images."""
        has_host = settings.num_host_pages > 0
        self.swaps = Swaps(settings.num_host_pages, self.tables.pool, self.states, counters) if has_host else None
        """None: pages that leave the cache are nowhere else."""
        self.running: dict[int, Request] = {}
        """By number."""
        self.prefilling: list[Request] = []
        self.left: list[int] = []
        """Slots that the next plan tells of."""
        self.suspect: Request | None = None
        """The one running request that may be what killed the workers, until no plan in flight can name it: when it
        leaves, they may be dying of it already."""
        self._by_slot: list[Request | None] = [None] * settings.max_num_seqs
        self._free_slots = list(range(settings.max_num_seqs - 1, -1, -1))
        self._leaving: deque[tuple[int, Request, bool]] = deque()
        """(last plan that may name it, request, whether it comes back): gives slot and pages back."""

    def at(self, slot: int) -> Request | None:
        return self._by_slot[slot]

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_coming_back(self) -> int:
        return sum(comes_back for _, _, comes_back in self._leaving)

    def load(self, num_waiting: int) -> Load:
        """Gauges. `num_waiting`: without those that come back."""
        return Load(
            num_running=len(self.running),
            num_waiting=num_waiting + self.num_coming_back,
            num_free_pages=self.num_available,
            num_pages=self._settings.num_pages,
            num_steps=self._counters.steps,
            num_preemptions=self._counters.preemptions,
            num_prefix_queries=self._counters.prefix_queries,
            num_prefix_hits=self._counters.prefix_hits,
            num_trials=self._counters.trials,
            num_guesses=self._counters.guesses,
            num_right_guesses=self._counters.right_guesses,
            num_host_pages=self._settings.num_host_pages,
            num_host_hits=self._counters.host_hits,
            num_stored_bytes=self._bytes(self._counters.stored, self._counters.stored_states),
            num_loaded_bytes=self._bytes(self._counters.loaded, self._counters.loaded_states),
        )

    def _bytes(self, num_pages: int, num_states: int) -> int:
        return num_pages * self._settings.page_bytes + num_states * self._settings.state_bytes

    @property
    def num_available(self) -> int:
        """Pages that nobody holds."""
        return self.tables.pool.num_available

    @property
    def num_coming_pages(self) -> int:
        """Pages that will be available once the plans in flight are complete, and the copies."""
        copied = 0 if self.swaps is None else self.swaps.num_coming_pages
        return copied + sum(self.tables.num_given_back(request.tables) for _, request, _ in self._leaving)

    @property
    def empty(self) -> bool:
        return not (self.running or self._leaving)

    # ------------------------------------------------------------------------------------------- coming

    def can_admit(self, request: Request) -> bool:
        """Whether there is a slot and room. Beside a suspect nobody enters: the next death has to name one alone."""
        slots, pages = (0, 0) if self.swaps is None else self.swaps.promised
        if len(self._free_slots) <= slots or self.suspect is not None:
            return False
        needed = self.tables.num_lacking(self._head(request).tables, len(request.token_ids))
        # Those that run need pages as they grow; admitting into the last ones would only send somebody away again.
        growing = len(self.running) * len(self._settings.windows)
        return needed + min(growing, self._settings.num_pages // 20) + pages <= self.num_available

    def waits_for_pages(self, request: Request) -> bool:
        """Whether pages of its prompt are on their way from the host's memory, or could be: then they are from now on.

        Not before it could be admitted: the room that they take is its own. A suspect lets nobody pass, and who finds
        its prompt with a running answer to it has no use for more.
        """
        if self.swaps is None or self.swaps.is_waiting(request):
            return self.swaps is not None
        shares = request.family is not None and bool(request.family.sources)
        if request.has_looked or shares or request.is_suspect or _computes_all(request) or not self.can_admit(request):
            return False
        hashes = request.hashes[1 : 1 + (len(request.token_ids) - 1) // self._settings.page_size]
        num_pages = self.tables.need.pages(len(request.token_ids))
        return self.swaps.load(request, self.tables.pool.find(hashes), hashes, num_pages)

    def admit(self, request: Request, now: float, draft: PlanDraft) -> None:
        """It takes a slot, and pages for all that it brings."""
        head = self._head(request)
        size = self._settings.page_size
        num_shared = head.num_tokens // size
        slot = request.slot = self._free_slots.pop()
        length = len(request.token_ids)
        self._counters.prefix_queries += length
        self._counters.prefix_hits += head.num_tokens
        if self.swaps is not None:
            self._counters.host_hits += min(request.num_loaded * size, head.num_tokens)
            request.has_looked, request.num_loaded = False, 0
            self.swaps.remembered(head.tables[0].pages, request.hashes[1 : 1 + num_shared])
        if request.admitted is None:
            request.admitted, request.num_cached = now, head.num_tokens
        request.num_remembered = num_shared
        request.lasting = num_shared, head.num_cached // size, (length - 1) // size
        request.cuts = self.states.cuts(length, head.num_tokens, head.num_cached)
        self.suspect = request if request.is_suspect else None
        self.running[request.number] = self._by_slot[slot] = request
        self.prefilling.append(request)
        self.slots.enter(request, head.num_tokens)
        if self.states.tile and head.num_tokens:
            self.states.restore(request.hashes[num_shared], slot, draft)
        request.tables = self.tables.begin(slot, head.tables, head.copied, length, draft)
        self._note_capacity(request)
        # Penalties count all tokens, and guesses are looked up among all.
        first = 0 if self._settings.looks_back or request.sampling.adjustments is not None else head.num_tokens
        ids = request.token_ids[first:].tobytes()
        images = request.images_behind(head.num_tokens)
        draft.enters.append(Enter(slot, ids, request.num_prompt, request.sampling, first, images))
        if request.family is not None:
            request.family.enter(request, helps=not self.states.tile or bool(request.cuts))

    def lacks_pages(self, slots: Slots, num_tokens: NDArray[np.int32]) -> bool:
        """Whether these slots cannot all grow to so many tokens each, more than they have room for."""
        more = num_tokens - self.slots.capacity[slots]
        num_pages = int((-(-more // self._settings.page_size)).sum())
        return num_pages * len(self._settings.windows) > self.num_available

    def room(self, request: Request, start: int) -> int:
        """Tokens of its prompt from `start` on, where the next part begins, for which there are pages, or could be."""
        self.tables.leave_behind(request.tables, start, request.lasting)
        return self.tables.room(request.tables, start)

    def grow(self, request: Request, num_tokens: int, draft: PlanDraft) -> int:
        """Give it pages for so many tokens, all or none; returns how many are lacking."""
        if self.slots.decoding[request.slot]:
            self.tables.leave_behind(request.tables, int(self.slots.known[request.slot]) - 1, request.lasting)
        lacking = self.tables.grow(request.slot, request.tables, num_tokens, draft)
        self._note_capacity(request)
        return lacking

    def _note_capacity(self, request: Request) -> None:
        self.slots.capacity[request.slot] = min(held.end for held in request.tables) * self._settings.page_size

    def share(self, request: Request, num_tokens: int) -> None:
        """The plan just made ends a chunk of its prompt here: its pages serve later plans, and at a cut its state."""
        self.remember(request, num_tokens)
        if num_tokens in request.cuts:
            self.states.reach(request.slot, request.hashes[num_tokens // self._settings.page_size])

    def remember(self, request: Request, num_tokens: int) -> None:
        """Pages filled by its first `num_tokens` tokens serve later plans, as far as their hashes are known."""
        if self._settings.deterministic:
            # What was generated has a decode step's bits; whoever brings it as a prompt shall have a prompt's.
            num_tokens = min(num_tokens, request.num_prompt)
        num_full = min(num_tokens // self._settings.page_size, len(request.hashes) - 1)
        first = request.num_remembered
        if num_full <= first:
            return
        hashes = request.hashes[first + 1 : num_full + 1]
        self.tables.remember(request.tables, first, hashes)
        if self.swaps is not None:
            self.swaps.remembered(request.tables[0].part(first, num_full).pages, hashes)
        request.num_remembered = num_full

    def _head(self, request: Request) -> Head:
        """What it need not compute. Its last token is always computed: somebody has to sample from it."""
        if _computes_all(request):
            return Head(0, self.tables.nothing())
        most, size = len(request.token_ids) - 1, self._settings.page_size
        tables, num_cached = self.tables.cached(request.hashes[1 : most // size + 1])
        num_tokens = tables[0].end * size
        if self.states.tile:  # of a source only keys and values are there: its state has gone on
            num_tokens = self.states.longest(request.hashes, num_tokens)
            tables = [held.part(0, num_tokens // size) for held in tables]
        elif request.family is not None and request.family.sources:
            num_shared = min(request.num_prompt, most)
            shared = self.tables.shared_with(request.family.sources[0].tables, num_shared)
            if num_shared > num_tokens and shared is not None:
                # Its source goes on writing behind the prompt, on the page that both end it on: that one is copied. The
                # source runs, so whatever becomes of it, its pages are given back after the plan in the making.
                return Head(num_shared, *shared)
        return Head(num_tokens, tables, num_cached=num_cached * size)

    # -------------------------------------------------------------------------------------------- going

    def leave(self, request: Request, last_plan: int, *, comes_back: bool) -> None:
        """It computes no more. Slot and pages are given back when plan `last_plan` is complete."""
        slot = request.slot
        self.slots.leave(slot)
        self.states.forget(slot)
        del self.running[request.number]
        if request in self.prefilling:
            self.prefilling.remove(request)
        if request.family is not None:
            request.family.leave(request)
        if comes_back:
            self._keep_tokens(request)
        self.left.append(slot)
        self._leaving.append((last_plan, request, comes_back))

    def never_mind(self, unwanted: Callable[[Request], bool]) -> None:
        """These do not come back."""
        self._leaving = deque((step, one, comes_back and not unwanted(one)) for step, one, comes_back in self._leaving)

    def give_back(self, completed_plan: int) -> list[Request]:
        """Slots and pages of those that left, once no plan in flight can name them. Returns those that come back."""
        back = []
        while self._leaving and self._leaving[0][0] <= completed_plan:
            _, request, comes_back = self._leaving.popleft()
            self.tables.give_back(request.tables)
            self._free_slots.append(request.slot)
            self._by_slot[request.slot] = None
            if request is self.suspect:
                self.suspect = None
            _forget_place(request)
            if comes_back:
                back.append(request)
        return back

    def lost(self) -> list[Request]:
        """When workers are gone: everybody who has to run again, from the tokens so far."""
        for request in self.running.values():
            self._keep_tokens(request)
        requests = [*self.running.values(), *(request for _, request, comes_back in self._leaving if comes_back)]
        for request in requests:
            in_doubt = max(self.slots.known[request.slot], self.slots.planned[request.slot])
            request.num_in_doubt = max(request.num_in_doubt, int(in_doubt))
            _forget_place(request)
        return requests

    def _keep_tokens(self, request: Request) -> None:
        """What it brings when it comes back."""
        known = int(self.slots.known[request.slot])
        request.bring(self.slots.tokens[request.slot, :known].copy(), again=self._settings.deterministic)


def _computes_all(request: Request) -> bool:
    """Something is asked about every token of its prompt."""
    return request.sampling.prompt_logprobs is not None and request.num_told == 0


def _forget_place(request: Request) -> None:
    if request.family is not None:
        request.family.leave(request)
    request.slot, request.tables, request.num_remembered = -1, [], 0
