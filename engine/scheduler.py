"""PROCESS scheduler: the step loop between the tokenizer and the workers.

A thin shell around the planner: it moves messages and looks at the clock. It knows no text and no torch.
"""

import os
import queue
import time
from collections import deque
from dataclasses import replace

import msgspec

from tercet.engine import child
from tercet.engine.awake_cores import AwakeCores, has_quota
from tercet.engine.child import SupervisorLink
from tercet.engine.grammar_crew import GrammarCrew
from tercet.engine.planner import Planner
from tercet.engine.planner_settings import make_settings
from tercet.engine.trace import Span, open_lanes, record_collections
from tercet.ipc.grammar_messages import Allowed, Disallowed
from tercet.ipc.process_messages import ExchangeWeights, Loaded, Serving, ToChild, WorkersAway, WorkersRestarted
from tercet.ipc.sockets import Inbox, Outbox
from tercet.ipc.step_messages import (
    Abort,
    Computed,
    Draw,
    Forget,
    Load,
    ReadWeights,
    Sampled,
    Step,
    Submit,
    Tokens,
    ToScheduler,
    Unservable,
)
from tercet.ipc.swap_messages import Swap, Swapped

_LOAD_SECONDS = 0.25
_RETRY_SECONDS = 0.01
"""Between attempts to send to a tokenizer that is far behind, or not there."""
_TAKING_SECONDS = 0.01
"""In a flood of messages the loop turns so often: those that run wait for plans, and the supervisor for a beat."""


def main(link: SupervisorLink) -> None:
    config = link.spec.config
    inbox: Inbox[ToScheduler] = Inbox(link.spec.own.scheduler, ToScheduler)
    link.tell(Loaded())
    limits = link.wait_begin()
    settings = replace(make_settings(config, limits), had_other_weights=link.spec.paths.weights is not None)
    grammars = GrammarCrew(link.spec, limits.vocab_size, settings.most_followed)
    planner = Planner(settings, os.urandom(32), grammars)
    planner.epoch = link.spec.incarnation
    kept = config.keep_cores_awake
    cores = AwakeCores(kept=limits.device == "cuda" and not has_quota() if kept is None else kept)
    loop = (StepLoop if config.trace_dir is None else TracedStepLoop)(planner, link, cores)
    link.tell(Serving())
    while True:
        loop.turn(inbox)


class StepLoop:
    """One turn: take what has arrived, plan while plans may be in flight, tell gauges and beats now and then."""

    def __init__(self, planner: Planner, link: SupervisorLink, cores: AwakeCores) -> None:
        self._planner = planner
        self._link = link
        self._cores = cores
        self._tokenizer = Outbox(link.spec.addresses.tokenizer)
        self._workers = [Outbox(address) for address in link.spec.own.workers]
        self._encoder = msgspec.msgpack.Encoder()
        self._last_load = 0.0
        self._told: Load | None = None
        self._aborted = bytearray()
        """Numbers (int64) of requests to be forgotten in this turn, all at once: that takes a walk along the line."""
        self._unsent: deque[Tokens | Unservable] = deque()
        """News for a tokenizer that is far behind: nothing is planned until it has them."""
        self._has_workers = True
        """That take plans: they are not away, and read no weights."""
        self._wakes_at: float | None = None
        """When there is something to do for the planner, whether or not a message comes."""
        self._commands: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
        self._own_inbox = Outbox(link.spec.own.scheduler)
        link.subscribe(self._hear)

    def _hear(self, command: ToChild) -> None:
        """In the link's thread. Whoever waits for a message is to look at once: here is one, of nobody's end."""
        self._commands.put(command)
        self._own_inbox.try_send(Abort(b""))

    def turn(self, inbox: Inbox[ToScheduler]) -> None:
        seconds = _RETRY_SECONDS if self._unsent else min(_LOAD_SECONDS, self._link.beat_seconds)
        if self._wakes_at is not None:
            seconds = min(seconds, max(0.0, self._wakes_at - time.monotonic()))
        message = inbox.receive(seconds)
        self._work(inbox, message, time.monotonic())

    def _work(self, inbox: Inbox[ToScheduler], message: ToScheduler | None, now: float) -> None:
        while not self._commands.empty():
            self._obey(self._commands.get(), now)
        while message is not None:
            self._take(message, now)
            message = inbox.receive(0) if time.monotonic() < now + _TAKING_SECONDS else None
        if self._aborted:
            self._planner.abort(Abort(bytes(self._aborted)))
            self._aborted.clear()
        # Before planning: cores wake up meanwhile.
        idle = self._planner.idle or not self._has_workers
        self._cores.look(now, wanted=self._planner.is_awaited and self._has_workers, idle=idle)
        while self._unsent and self._tokenizer.try_send(self._unsent[0]):
            self._unsent.popleft()
        plans = self._has_workers and not self._unsent
        while plans and not self._unsent and (self._draw(now) or self._swap() or self._plan(now)) is not None:
            pass
        self._wakes_at = self._planner.wakes_at(now) if plans and not self._unsent else None
        self._tell(now)

    def _plan(self, now: float) -> Step | None:
        step = self._planner.plan(now)
        if step is not None:
            self._order(step)
        return step

    def _draw(self, now: float) -> Draw | None:
        draw = self._planner.draw(now)
        if draw is not None:
            self._order(draw)
        return draw

    def _swap(self) -> Swap | None:
        swap = self._planner.swap()
        if swap is not None:
            self._order(swap)
        return swap

    def _order(self, message: Step | Draw | Swap | ReadWeights) -> None:
        encoded = self._encoder.encode(message)
        for worker in self._workers:
            worker.send_encoded(encoded)

    def _take(self, message: ToScheduler, now: float) -> None:
        match message:
            case Sampled():
                if message.epoch == self._planner.epoch and (tokens := self._planner.complete(message, now)):
                    self._send(tokens)
            case Computed():
                if message.epoch == self._planner.epoch:
                    self._planner.computed(message, now)
            case Swapped():
                if message.epoch == self._planner.epoch:
                    self._planner.swapped(message)
            case Submit():
                if (unservable := self._planner.submit(message, now)) is not None:
                    self._send(unservable)
            case Abort(numbers=numbers):
                self._aborted += numbers
            case Forget():
                self._planner.forget(message)
                self._told = None  # a new tokenizer knows no gauges
            case Allowed() | Disallowed():
                for unservable in self._planner.take_masks(message, now):
                    self._send(unservable)

    def _obey(self, command: ToChild, now: float) -> None:
        match command:
            case WorkersAway():
                self._has_workers = False
            case ExchangeWeights(number=number, path=path):
                self._has_workers = False
                self._order(ReadWeights(number, self._planner.epoch, path))
            case WorkersRestarted():
                self._has_workers = True
                for unservable in self._planner.restart(command, now):
                    self._send(unservable)
            case _:
                raise AssertionError(f"the supervisor says {command!r} to a scheduler")

    def _send(self, message: Tokens | Unservable) -> None:
        if self._unsent or not self._tokenizer.try_send(message):
            self._unsent.append(message)

    def _tell(self, now: float) -> None:
        if now - self._last_load >= _LOAD_SECONDS or (self._planner.idle and self._told and self._told.num_running):
            for unservable in (*self._planner.expire(now), *self._planner.check_masks()):
                self._send(unservable)
            load = msgspec.structs.replace(self._planner.load(), replica=self._link.spec.replica)
            if load != self._told and self._tokenizer.try_send(load):
                self._told = load
            self._last_load = now
        self._link.beat(self._planner.num_steps)


class TracedStepLoop(StepLoop):
    """A step loop that leaves a record."""

    def __init__(self, planner: Planner, link: SupervisorLink, cores: AwakeCores) -> None:
        super().__init__(planner, link, cores)
        folder = link.spec.config.trace_dir or ""
        self._lane, garbage = open_lanes(folder, link.spec.lane, "loop", "garbage")
        record_collections(garbage)

    def _work(self, inbox: Inbox[ToScheduler], message: ToScheduler | None, now: float) -> None:
        begin_ns = self._lane.now()
        super()._work(inbox, message, now)
        self._lane.end(Span.TURN, begin_ns)

    def _take(self, message: ToScheduler, now: float) -> None:
        begin_ns = self._lane.now()
        super()._take(message, now)
        match message:
            case Sampled(step_id=step_id):
                self._lane.end(Span.TAKE_SAMPLED, begin_ns, step_id)
            case Submit(number=number):
                self._lane.end(Span.TAKE_SUBMIT, begin_ns, number)
            case _:
                self._lane.end(Span.TAKE_OTHER, begin_ns)

    def _plan(self, now: float) -> Step | None:
        begin_ns = self._lane.now()
        step = super()._plan(now)
        if step is not None:
            self._lane.end(Span.PLAN, begin_ns, step.step_id, step.count)
        return step


if __name__ == "__main__":
    child.run(main)
