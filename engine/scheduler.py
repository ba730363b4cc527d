"""PROCESS scheduler: the step loop between the tokenizer and the workers.

A thin shell around the planner: it moves messages and looks at the clock. It knows no text and no torch.
"""

import os
import time

import msgspec

from tercet.engine import child
from tercet.engine.child import SupervisorLink
from tercet.engine.planner import Planner, PlannerSettings
from tercet.ipc.messages import Abort, Beat, Load, Loaded, Sampled, Serving, Submit, ToScheduler
from tercet.ipc.sockets import Inbox, Outbox

_BEAT_SECONDS = 1.0
_LOAD_SECONDS = 0.25


def main(link: SupervisorLink) -> None:
    addresses, config = link.spec.addresses, link.spec.config
    inbox: Inbox[ToScheduler] = Inbox(addresses.scheduler, ToScheduler)
    link.tell(Loaded())
    limits = link.wait_begin()
    settings = PlannerSettings(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_pages=limits.num_pages,
        page_size=config.page_size,
        run_ahead=config.run_ahead,
        max_lease=config.max_lease,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    loop = StepLoop(Planner(settings, os.urandom(32)), link)
    link.tell(Serving())
    while True:
        loop.turn(inbox)


class StepLoop:
    """One turn: take what has arrived, plan while plans may be in flight, tell gauges and beats now and then."""

    def __init__(self, planner: Planner, link: SupervisorLink) -> None:
        self._planner = planner
        self._link = link
        self._tokenizer = Outbox(link.spec.addresses.tokenizer)
        self._workers = [Outbox(address) for address in link.spec.addresses.workers]
        self._encoder = msgspec.msgpack.Encoder()
        self._last_load = self._last_beat = 0.0
        self._told: Load | None = None

    def turn(self, inbox: Inbox[ToScheduler]) -> None:
        message = inbox.receive(_LOAD_SECONDS)
        now = time.monotonic()
        while message is not None:
            self._take(message, now)
            message = inbox.receive(0)
        while (step := self._planner.plan(now)) is not None:
            encoded = self._encoder.encode(step)
            for worker in self._workers:
                worker.send_encoded(encoded)
        self._tell(now)

    def _take(self, message: ToScheduler, now: float) -> None:
        match message:
            case Sampled():
                if (tokens := self._planner.complete(message, now)) is not None:
                    self._tokenizer.send(tokens)
            case Submit():
                if (unservable := self._planner.submit(message, now)) is not None:
                    self._tokenizer.send(unservable)
            case Abort():
                self._planner.abort(message)

    def _tell(self, now: float) -> None:
        if now - self._last_load >= _LOAD_SECONDS or (self._planner.idle and self._told and self._told.num_running):
            load = self._planner.load()
            if load != self._told:
                self._tokenizer.send(load)
            self._last_load, self._told = now, load
        if now - self._last_beat >= _BEAT_SECONDS:
            self._link.tell(Beat(self._planner.load().num_steps))
            self._last_beat = now


if __name__ == "__main__":
    child.run(main)
