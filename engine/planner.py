"""From queues of requests to plans for the workers, and from sampled tokens to ends of requests. Pure: no socket.

Plans run ahead of results: rows are planned as if no request ever stopped early; a row whose request has ended
computes nothing on the worker, and its result is dropped here. What is known of each slot is in `SlotArrays`, so a step
of 256 decoding requests costs a few array operations and no loop.

A slot and its pages are given back when the last plan that may name them is complete.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tercet.engine.pages import PagePool, PrefixHasher
from tercet.engine.request import Request, end_reason, extend_hashes, make_request
from tercet.engine.slot_arrays import SlotArrays
from tercet.engine.waiting_line import WaitingLine
from tercet.ipc.messages import (
    Abort,
    Ended,
    Enter,
    Forget,
    Load,
    Sampled,
    Started,
    Step,
    Submit,
    Tokens,
    Unservable,
    WorkersRestarted,
)


@dataclass(frozen=True)
class PlannerSettings:
    """What of the engine's configuration and the model's limits the planner follows; names as there."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int
    run_ahead: int
    max_lease: int
    enable_prefix_caching: bool


@dataclass(frozen=True)
class _InFlight:
    step_id: int
    count: int
    slots: NDArray[np.int32]
    """Slot of each row."""


class Planner:
    """All requests of an engine. Fed with messages, asked for plans."""

    def __init__(self, settings: PlannerSettings, hash_key: bytes) -> None:
        self._settings = settings
        self._hasher = PrefixHasher(hash_key, settings.page_size)
        self._waiting = WaitingLine()
        self._forgotten = 0
        """Requests with lower numbers are nobody's."""
        self.epoch = 0
        self._num_steps = self._num_preemptions = self._num_queries = self._num_hits = 0
        self._begin_empty()

    def _begin_empty(self) -> None:
        """As it is when workers have just started: they hold nothing and compute nothing."""
        settings = self._settings
        self._pool = PagePool(settings.num_pages, caching=settings.enable_prefix_caching)
        self._prefilling: list[Request] = []
        self._running: dict[int, Request] = {}
        """By number, oldest first."""
        self._by_slot: list[Request | None] = [None] * settings.max_num_seqs
        self._free_slots = list(range(settings.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[_InFlight] = deque()
        self._leaving: deque[tuple[int, Request, bool]] = deque()
        """(last plan that may name it, request, whether it comes back): gives slot and pages back."""
        self._left: list[int] = []
        self._next_step = 0
        self._suspect: Request | None = None
        """The one running request that may be what killed the workers."""
        self._slots = SlotArrays(settings.max_num_seqs, settings.max_model_len)

    # ---------------------------------------------------------------------------------------- requests

    def submit(self, message: Submit, now: float) -> Unservable | None:
        """Queue a request, or say why it can never run."""
        if message.number < self._forgotten:
            return None
        request = make_request(message, self._hasher, now)
        if (unservable := self._too_long(request)) is not None:
            return unservable
        self._waiting.add(request)
        return None

    def _too_long(self, request: Request) -> Unservable | None:
        needed, size = request.max_length - 1, self._settings.page_size  # the last token's K and V are never wanted
        available = (self._settings.num_pages - 1) * size
        if _pages(needed, size) * size <= available:
            return None
        return Unservable(
            request.number,
            "too_long_for_cache",
            f"prompt ({request.num_prompt} tokens) and max_tokens ({request.sampling.max_tokens}) need "
            f"{needed} tokens of KV cache; want at most {available}, all that --kv-cache-memory allows",
        )

    def abort(self, message: Abort) -> None:
        """Forget requests, whatever they are doing; numbers unknown by now are fine."""
        numbers = set(np.frombuffer(message.numbers, np.int64).tolist())
        self._drop(lambda request: request.number in numbers)

    def forget(self, message: Forget) -> None:
        """These are nobody's, and nor is what may still come of them."""
        self._forgotten = message.before
        self._drop(lambda request: request.number < message.before)

    def _drop(self, unwanted: Callable[[Request], bool]) -> None:
        self._waiting.remove_if(unwanted)
        for request in [request for request in self._running.values() if unwanted(request)]:
            self._leave(request, comes_back=False)
        self._leaving = deque(
            (step, request, comes_back and not unwanted(request)) for step, request, comes_back in self._leaving
        )

    def restart(self, message: WorkersRestarted) -> list[Unservable]:
        """All that the workers held is lost: everything runs again from its tokens, as after a preemption.

        If a step may have killed them, whoever ran is a suspect: suspects run first, one at a time, and one that sees
        the workers die a second time is given up. So innocents go on, and nothing kills an engine for ever.
        """
        for request in self._running.values():
            request.token_ids = self._slots.tokens[request.slot, : self._slots.known[request.slot]].copy()
        back = [*self._running.values(), *(request for _, request, comes_back in self._leaving if comes_back)]
        guilty = self._suspect if message.blame is not None else None
        for request in back:
            request.slot, request.pages, request.num_remembered = -1, [], 0
            request.is_suspect = request.is_suspect or (message.blame is not None and guilty is None)
        self._settings = replace(self._settings, num_pages=message.limits.num_pages)
        self.epoch = message.epoch
        self._begin_empty()
        failed = []
        for request in (*back, *self._waiting.remove_if(lambda request: True)):
            if request is guilty:
                text = f"the workers died twice while they computed this request; the last time: {message.blame}"
                failed.append(Unservable(request.number, "engine_died", text))
            elif (unservable := self._too_long(request)) is not None:
                failed.append(unservable)
            else:
                self._waiting.add(request)
        return failed

    def load(self) -> Load:
        """Gauges."""
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + sum(comes_back for _, _, comes_back in self._leaving),
            num_free_pages=self._pool.num_available,
            num_pages=self._settings.num_pages,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._num_queries,
            num_prefix_hits=self._num_hits,
        )

    @property
    def num_steps(self) -> int:
        """Planned since start."""
        return self._num_steps

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not (self._running or self._waiting or self._leaving or self._in_flight)

    # ------------------------------------------------------------------------------------------- plans

    def plan(self, now: float) -> Step | None:
        """The next plan, if there is one to make and fewer than `run_ahead` are in flight."""
        if len(self._in_flight) >= self._settings.run_ahead:
            return None
        budget = self._settings.max_num_batched_tokens
        pages: list[tuple[int, int, int]] = []
        decodes, count = self._plan_decodes(pages)
        if not len(decodes) and not self._in_flight:  # what preemption freed, if anything, is there at once
            decodes, count = self._plan_decodes(pages)
        enters, chunks = self._plan_chunks(budget - len(decodes), pages, now)
        if not len(decodes) and not chunks:
            return None
        if chunks:
            count = 1
        self._slots.planned[decodes] = self._slots.planned_after(decodes, count)
        chunk_rows = np.array(chunks, np.int32).reshape(-1, 3)
        step = Step(
            self._next_step,
            count,
            np.array(self._left, np.int32).tobytes(),
            tuple(enters),
            np.array(pages, np.int32).tobytes(),
            chunk_rows.tobytes(),
            decodes.tobytes(),
            self.epoch,
        )
        self._left.clear()
        self._in_flight.append(_InFlight(step.step_id, count, np.concatenate([decodes, chunk_rows[:, 0]])))
        self._next_step += 1
        self._num_steps += count
        for slot, start, length in chunks:
            self._remember_prompt_pages(slot, start + length)
        return step

    def _plan_decodes(self, pages: list[tuple[int, int, int]]) -> tuple[NDArray[np.int32], int]:
        """Slots that decode, with room for every step of the lease."""
        slots = self._slots.that_decode()
        if not len(slots):
            return slots, 1
        count = 1
        if not self._waiting and not self._prefilling:
            count = min(self._settings.max_lease, self._slots.longest_lease(slots))
        wanted = self._slots.planned_after(slots, count)
        lacking = np.flatnonzero(wanted > self._slots.capacity[slots])
        if not len(lacking):
            return slots, count
        shortage, without = 0, []
        for row in lacking.tolist():
            request = self._by_slot[slots[row]]
            assert request is not None
            more = _pages(int(wanted[row]), self._settings.page_size) - len(request.pages)
            if more <= self._pool.num_available:
                self._append_pages(request, self._pool.take(more), pages)
            else:
                shortage += more
                without.append(request.slot)
        if without:
            self._make_room(shortage)
            pages[:] = [triple for triple in pages if self._slots.alive[triple[0]]]
            slots = slots[self._slots.alive[slots] & ~np.isin(slots, without)]
        return slots, count

    def _make_room(self, shortage: int) -> None:
        """Preempt until `shortage` pages are there, or will be when the plans in flight are complete."""
        coming = sum(self._pool.num_given_back(request.pages) for _, request, _ in self._leaving)
        while shortage > self._pool.num_available + coming and len(self._running) > 1:
            victim = max(self._running.values(), key=lambda request: (request.priority, request.number))
            if self._in_flight:
                coming += self._pool.num_given_back(victim.pages)
            self._preempt(victim)

    def _plan_chunks(
        self, budget: int, pages: list[tuple[int, int, int]], now: float
    ) -> tuple[list[Enter], list[tuple[int, int, int]]]:
        """Parts of prompts for what the decodes leave of the budget: first those begun, then new ones."""
        enters: list[Enter] = []
        chunks: list[tuple[int, int, int]] = []
        candidates = list(self._prefilling)
        while budget > 0:
            if candidates:
                request = candidates.pop(0)
                others_wait = bool(candidates) or self._can_admit()
            elif self._can_admit():
                request = self._admit(enters, pages, now)
                others_wait = self._can_admit()
            else:
                break
            slot = request.slot
            start, end = int(self._slots.planned[slot]), len(request.token_ids)
            length = min(end - start, budget)
            if others_wait and length < end - start:
                length = max(budget // 2, 1)  # a prompt that does not fit leaves room for shorter ones
            chunks.append((slot, start, length))
            budget -= length
            self._slots.planned[slot] = start + length
            if start + length == end:
                self._prefilling.remove(request)
                self._slots.decoding[slot] = True
        return enters, chunks

    def _can_admit(self) -> bool:
        if not self._waiting or not self._free_slots or self._suspect is not None:
            return False
        request = self._waiting.first
        cached = self._cached_prefix(request)
        needed = _pages(len(request.token_ids), self._settings.page_size) - len(cached) + self._pool.num_kept(cached)
        # Those that run need pages as they grow; admitting into the last ones would only send somebody away again.
        reserve = min(len(self._running), self._settings.num_pages // 20)
        return needed + reserve <= self._pool.num_available

    def _cached_prefix(self, request: Request) -> list[int]:
        """Cached pages it can use. Its last token is always computed: somebody has to sample from it."""
        most = (len(request.token_ids) - 1) // self._settings.page_size
        return self._pool.find(request.hashes[1 : most + 1])

    def _admit(self, enters: list[Enter], pages: list[tuple[int, int, int]], now: float) -> Request:
        request = self._waiting.pop()
        cached = self._cached_prefix(request)
        self._pool.hold(cached)
        slot = request.slot = self._free_slots.pop()
        length = len(request.token_ids)
        num_cached = len(cached) * self._settings.page_size
        self._num_queries += length
        self._num_hits += num_cached
        if request.admitted is None:
            request.admitted, request.num_cached = now, num_cached
        request.num_remembered = len(cached)
        self._suspect = request if request.is_suspect else None
        self._running[request.number] = self._by_slot[slot] = request
        self._prefilling.append(request)
        self._slots.enter(request, num_cached)
        more = self._pool.take(_pages(length, self._settings.page_size) - len(cached))
        self._append_pages(request, cached + more, pages)
        enters.append(Enter(slot, request.token_ids.tobytes(), request.num_prompt, request.sampling))
        return request

    def _append_pages(self, request: Request, new: list[int], pages: list[tuple[int, int, int]]) -> None:
        pages += [(request.slot, len(request.pages) + index, page) for index, page in enumerate(new)]
        request.pages += new
        self._slots.capacity[request.slot] = len(request.pages) * self._settings.page_size

    def _remember_prompt_pages(self, slot: int, computed: int) -> None:
        """Pages filled by the plan just made serve later plans, which workers run after it."""
        request = self._by_slot[slot]
        if request is not None:
            self._remember(request, min(computed // self._settings.page_size, len(request.hashes) - 1))

    def _remember(self, request: Request, num_full: int) -> None:
        for index in range(request.num_remembered, num_full):
            self._pool.remember(request.pages[index], request.hashes[index + 1])
        request.num_remembered = max(request.num_remembered, num_full)

    # ----------------------------------------------------------------------------------------- results

    def complete(self, sampled: Sampled, now: float) -> Tokens | None:
        """Take a step's tokens; None if none of them belongs to a request that is still wanted."""
        plan = self._in_flight[0]
        assert sampled.step_id == plan.step_id, f"step {sampled.step_id} is complete; {plan.step_id} is due"
        token_ids = np.frombuffer(sampled.token_ids, np.int32)
        rows = (token_ids >= 0) & self._slots.alive[plan.slots]
        slots, token_ids = plan.slots[rows], token_ids[rows]
        lengths = self._slots.append(slots, token_ids)
        if self._suspect is not None and self._suspect.slot in slots:
            self._suspect.is_suspect, self._suspect = False, None
        message = None
        if len(slots):
            numbers = self._slots.number[slots].tobytes()
            message = Tokens(numbers, token_ids.tobytes(), *self._find_ends(slots, lengths, token_ids, now))
        if sampled.index == plan.count - 1:
            self._in_flight.popleft()
            self._give_back(plan.step_id)
        return message

    def _find_ends(
        self, slots: NDArray[np.int32], lengths: NDArray[np.int32], token_ids: NDArray[np.int32], now: float
    ) -> tuple[tuple[Ended, ...], tuple[Started, ...]]:
        """Who ends and who begins with these tokens; full pages are remembered on the way."""
        first = self._slots.that_begin(slots, lengths)
        full = lengths % self._settings.page_size == 1  # the page before this token is full, and computed
        ends = self._slots.that_may_end(slots, lengths, token_ids)
        ended, started = [], []
        for row in np.flatnonzero(ends | full | first).tolist():
            request = self._by_slot[slots[row]]
            assert request is not None
            length = int(lengths[row])
            if request.first_token is None:
                request.first_token = now
                usage = request.usage(length, now)
                started.append(Started(request.number, usage.num_cached_tokens, usage.queued_s, usage.prefill_s))
            if full[row]:
                extend_hashes(request, self._hasher, self._slots.tokens[request.slot, :length])
                self._remember(request, length // self._settings.page_size)
            if ends[row] and (reason := end_reason(int(token_ids[row]), request, length)):
                ended.append(Ended(request.number, *reason, request.usage(length, now)))
                self._leave(request, comes_back=False)
        return tuple(ended), tuple(started)

    # -------------------------------------------------------------------------------------------- ends

    def _preempt(self, request: Request) -> None:
        """Take a request's pages away; it is computed again later, and nobody will see a difference."""
        self._num_preemptions += 1
        request.num_preemptions += 1
        self._leave(request, comes_back=True)

    def _leave(self, request: Request, *, comes_back: bool) -> None:
        slot = request.slot
        self._slots.leave(slot)
        del self._running[request.number]
        if request is self._suspect:
            self._suspect = None
        if request in self._prefilling:
            self._prefilling.remove(request)
        if comes_back:
            request.token_ids = self._slots.tokens[slot, : self._slots.known[slot]].copy()
        self._left.append(slot)
        self._leaving.append((self._next_step - 1, request, comes_back))
        if not self._in_flight:
            self._give_back(self._next_step - 1)

    def _give_back(self, completed_step: int) -> None:
        """Slots and pages of those that left, once no plan in flight can name them."""
        while self._leaving and self._leaving[0][0] <= completed_step:
            _, request, comes_back = self._leaving.popleft()
            self._pool.give_back(request.pages)
            self._free_slots.append(request.slot)
            self._by_slot[request.slot] = None
            request.slot, request.pages, request.num_remembered = -1, [], 0
            if comes_back:
                self._waiting.add(request)


def _pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
