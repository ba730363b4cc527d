"""From queues of requests to plans for the workers, and from sampled tokens to ends of requests. Pure: no socket.

Plans run ahead of results: rows are planned as if no request ever stopped early; a row whose request has ended
computes nothing on the worker, and its result is dropped here. What is known of each slot is in `SlotArrays`, so a step
of 256 decoding requests costs a few array operations and no loop.

A slot and its pages are given back when the last plan that may name them is complete.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from tercet.engine.admission import Admission
from tercet.engine.constraints import Constraints, MaskSource
from tercet.engine.counters import Counters
from tercet.engine.decode_rows import DecodeRows
from tercet.engine.ends import find_turns, said_of_prompts
from tercet.engine.given_up import KILLS_WORKERS
from tercet.engine.guessing import Guessing
from tercet.engine.lease import Lease
from tercet.engine.pages import PrefixHasher
from tercet.engine.pending_draw import PendingDraw
from tercet.engine.plan_draft import InFlight, PlanDraft
from tercet.engine.plan_times import PlanTimes
from tercet.engine.planner_settings import PlannerSettings
from tercet.engine.request import Request, make_requests
from tercet.engine.residents import Residents
from tercet.engine.step_logs import select_rows
from tercet.engine.waiting_line import WaitingLine, make_fit
from tercet.ipc.grammar_messages import Allowed, Disallowed
from tercet.ipc.process_messages import WorkersRestarted
from tercet.ipc.step_messages import (
    Abort,
    Computed,
    Draw,
    Forget,
    Load,
    Sampled,
    Step,
    Submit,
    Tokens,
    Unservable,
)
from tercet.ipc.swap_messages import Swap, Swapped


class Planner:
    """All requests of a replica. Fed with messages, asked for plans."""

    def __init__(self, settings: PlannerSettings, hash_key: bytes, grammars: MaskSource | None = None) -> None:
        """Without `grammars` no request may have one."""
        self._constraints = Constraints(grammars, settings.most_followed)
        self._settings = settings
        self._hasher = PrefixHasher(hash_key, settings.page_size) if settings.enable_prefix_caching else None
        self._waiting = WaitingLine(settings)
        self._counters = Counters()
        self._forgotten = 0
        """Requests with lower numbers are nobody's."""
        self.epoch = 0
        self._begin_empty()

    def _begin_empty(self) -> None:
        """As it is when workers have just started: they hold nothing and compute nothing."""
        self._residents = Residents(self._settings, self._counters)
        self._slots = self._residents.slots
        self._admission = Admission(self._waiting, self._residents, self._constraints, self._preempt)
        self._in_flight: deque[InFlight] = deque()
        self._lease = Lease(self._settings.max_lease, self._settings.max_lease_ms / 1e3)
        self._pending = PendingDraw(self._slots, self._constraints)
        self._guessing = Guessing(self._settings.speculation, self._slots, self._counters)
        watched = self._constraints, self._lease, self._guessing
        self._decode_rows = DecodeRows(self._residents, *watched, self._preempt)
        known = self._constraints, self._waiting, self._residents
        self._times = PlanTimes(self._in_flight, self._pending, self._lease, *known)
        self._next_step = 0

    # ---------------------------------------------------------------------------------------- requests

    def submit(self, message: Submit, now: float) -> Unservable | None:
        """Queue a request, or say why it can never run, or not now."""
        if message.number < self._forgotten:
            return None
        full = None if message.again else self._waiting.is_full(message, self._residents.num_free_slots)
        if full is not None:
            return full
        requests = make_requests(message, self._hasher, now, again=self._settings.generates_again)
        for request in requests:
            if (unservable := make_fit(request, self._settings)) is not None:
                return unservable
        for request in requests:
            self._waiting.add(request)
        return None

    def abort(self, message: Abort) -> None:
        """Forget requests, whatever they are doing; numbers unknown by now are fine."""
        numbers = set(np.frombuffer(message.numbers, np.int64).tolist())
        self._drop(lambda request: request.number in numbers)

    def forget(self, message: Forget) -> None:
        """These are nobody's, and nor is what may still come of them."""
        self._forgotten = message.before
        self._drop(lambda request: request.number < message.before)

    def _drop(self, unwanted: Callable[[Request], bool]) -> None:
        for request in self._waiting.remove_if(unwanted):
            self._constraints.end(request.number)
        for request in [request for request in self._residents.running.values() if unwanted(request)]:
            self._leave(request, comes_back=False)
        self._residents.never_mind(unwanted)

    def expire(self, now: float) -> list[Unservable]:
        """Those that have waited in vain for as long as they were willing to."""
        expired = self._waiting.expire(now)
        for unservable in expired:
            self._constraints.end(unservable.number)
        return expired

    def take_masks(self, message: Allowed | Disallowed, now: float) -> list[Unservable]:
        """What requests that have a grammar wait for. Returns those that cannot go on."""
        news = self._constraints.take(message)
        slots = np.array([request.slot for request, _ in news if request.slot >= 0], np.int32)
        if len(slots):  # not of those alone that have yet to begin
            self._constraints.note_delays(now - self._slots.asked_at[slots])
        return self._go_on(news)

    def check_masks(self) -> list[Unservable]:
        """See that masks are still being computed. Returns those that cannot go on."""
        return self._go_on(self._constraints.check())

    def _go_on(self, news: list[tuple[Request, str | None]]) -> list[Unservable]:
        failed = []
        for request, failure in news:
            if failure is not None:
                self._drop(lambda one, gone=request: one is gone)  # type: ignore[misc]
                failed.append(Unservable(request.number, "invalid_request", failure))
            elif request.slot >= 0:
                self._slots.lacks_mask[request.slot] = False
            else:
                self._waiting.bring_back(request)
        return failed

    def restart(self, message: WorkersRestarted, now: float) -> list[Unservable]:
        """All that the workers held is lost: everything runs again from its tokens, as after a preemption.

        If a step may have killed them, whoever ran is a suspect: suspects run first, one at a time, and one that sees
        the workers die a second time is given up. So innocents go on, and nothing kills an engine for ever.
        """
        guilty = self._residents.suspect if message.blame is not None else None
        back = self._residents.lost()
        for request in back:
            request.is_suspect = request.is_suspect or (message.blame is not None and guilty is None)
        self._settings = self._settings.after(message)
        self.epoch = message.epoch
        self._constraints.end_all()
        self._begin_empty()
        failed = []
        for request in (*back, *self._waiting.remove_if(lambda request: True)):
            if message.other_weights:
                request.keep_tokens()
            if request is guilty:
                text = f"the workers died twice while they computed this request; the last time: {message.blame}"
                failed.append(Unservable(request.number, KILLS_WORKERS, text))
            elif (unservable := make_fit(request, self._settings)) is not None:
                failed.append(unservable)
            else:
                self._waiting.add(request)
        return failed

    def load(self) -> Load:
        """Gauges."""
        return self._residents.load(len(self._waiting))

    @property
    def num_steps(self) -> int:
        """Planned since start."""
        return self._counters.steps

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return self._residents.empty and not (self._waiting or self._in_flight)

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for a slot, for a prompt to be computed, or, token by token, for what a grammar allows."""
        return self._times.is_awaited

    # ------------------------------------------------------------------------------------------- plans

    def plan(self, now: float) -> Step | None:
        """The next plan, if there is one to make and fewer than `run_ahead` are in flight, all of them drawn."""
        if self._pending or len(self._in_flight) >= self._settings.run_ahead or self._times.waits_until(now):
            return None
        draft = PlanDraft()
        prompts_wait = bool(self._waiting or self._residents.prefilling)
        in_flight = bool(self._in_flight)
        decodes, count, guesses = self._decode_rows.plan(draft, prompts_wait=prompts_wait, in_flight=in_flight)
        budget, alone = self._settings.max_num_batched_tokens - len(decodes), not (len(decodes) or in_flight)
        self._admission.plan_chunks(budget, draft, now, alone=alone)
        if draft.chunks:
            self._lease.prompts_planned(sum(length for _, _, length in draft.chunks), now)
            decodes, count, guesses = decodes[~self._slots.awaits_mask(decodes)], 1, 0  # they wait for nobody's mask
        if not len(decodes) and not draft.chunks:
            return None
        longest, awaits = self._slots.longest(decodes), self._slots.awaits_mask(decodes)
        slots = np.concatenate([decodes, draft.chunk_slots])
        self._slots.plan(decodes, slots, count * (1 + guesses))
        sampling = np.concatenate([decodes[~awaits], slots[len(decodes) :]])
        masks = self._constraints.masks(self._slots, sampling[self._slots.decoding[sampling]])
        late, left = bool(awaits.any()), self._residents.left
        swapped = 0 if self._residents.swaps is None else self._residents.swaps.completed
        step = draft.to_step(self._next_step, count, left, decodes, self.epoch, masks, longest, late, guesses, swapped)
        left.clear()
        self._in_flight.append(InFlight.of(step, slots))
        self._pending.begin(step, slots, awaits)
        if len(self._in_flight) == 1:
            self._pending.turn_comes(now)
        self._next_step += 1
        self._counters.steps += count
        self._admission.share(draft.chunks)
        return step

    def computed(self, message: Computed, now: float) -> None:
        """The device has come to the draw of a plan."""
        self._pending.computed(message, now)

    def draw(self, now: float) -> Draw | None:
        """The rest of the last plan, if that awaits masks and it is time; or some of them ahead of it."""
        return self._times.draw(now)

    def wakes_at(self, now: float) -> float | None:
        """When it is time to draw or to plan, if nothing happens before."""
        return self._times.wakes_at(now)

    def _preempt(self, victim: Request) -> None:
        self._counters.preemptions += 1
        victim.num_preemptions += 1
        self._leave(victim, comes_back=True)

    def swap(self) -> Swap | None:
        """Pages to be copied beside the steps, to the host's memory or back, if there are any."""
        if (swaps := self._residents.swaps) is None:
            return None
        self._admission.next_in_line()  # for whom pages may come, while no plan can be made
        completed = self._in_flight[0].step_id if self._in_flight else self._next_step
        return swaps.take(self._next_step - 1, completed - 1, self.epoch)

    # ----------------------------------------------------------------------------------------- results

    def swapped(self, message: Swapped) -> None:
        """Copies are made."""
        assert self._residents.swaps is not None
        for request in self._residents.swaps.complete(message.number):
            self._waiting.bring_back(request)

    def complete(self, sampled: Sampled, now: float) -> Tokens | None:
        """Take a step's tokens; None if none of them belongs to a request that is still wanted."""
        plan = self._in_flight[0]
        assert sampled.step_id == plan.step_id, f"step {sampled.step_id} is complete; {plan.step_id} is due"
        all_ids = np.frombuffer(sampled.token_ids, np.int32)
        rows, slots, token_ids, lengths = self._slots.take(plan.slots, plan.width, all_ids)
        # First of all, since what takes longest follows from it. Who ends with its token is asked about for nothing.
        self._constraints.accept(self._slots, slots, token_ids, now)
        ended, started, leaving = find_turns(
            self._residents, self._hasher, self._settings.page_size, slots, lengths, token_ids, now
        )
        # While those that end here have their slots.
        prompt_logs = said_of_prompts(sampled.prompt_logs, plan.slots, self._slots)
        vectors = said_of_prompts(sampled.vectors, plan.slots, self._slots)
        for request in leaving:
            self._leave(request, comes_back=False)
        new = lengths > self._slots.told[slots]
        suspect = self._residents.suspect
        if suspect is not None and self._slots.known[suspect.slot] > suspect.num_in_doubt:
            suspect.is_suspect, self._residents.suspect = False, None
        message = None
        if new.any() or ended or started or prompt_logs:
            logs = None if sampled.logs is None else select_rows(sampled.logs, rows[new])
            numbers = self._slots.number[slots[new]].tobytes()
            message = Tokens(numbers, token_ids[new].tobytes(), ended, started, logs, prompt_logs, vectors)
        if sampled.index == plan.count - 1:
            self._in_flight.popleft()
            self._pending.turn_comes(now)
            self._give_back(plan.step_id)
        seconds = self._lease.completed(now, is_decode=plan.is_decode, more_in_flight=bool(self._in_flight))
        self._guessing.completed(plan, all_ids, seconds)
        return message

    def _leave(self, request: Request, *, comes_back: bool) -> None:
        self._constraints.end(request.number)
        self._residents.leave(request, self._next_step - 1, comes_back=comes_back)
        self._waiting.call_back(request.family)
        if not self._in_flight:
            self._give_back(self._next_step - 1)

    def _give_back(self, completed_step: int) -> None:
        for request in self._residents.give_back(completed_step):
            self._waiting.add(request)
