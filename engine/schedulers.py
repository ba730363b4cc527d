"""The tokenizer's ways to the schedulers of all replicas, and which of them a request takes.

A request stays with its replica until it ends: whatever dies there is replaced, and goes on with it. With one replica
there is nothing to choose.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import anyio
import zmq

from tercet.engine.child import ChildSpec
from tercet.engine.front_desk import FrontDesk
from tercet.engine.live import Asked, Live
from tercet.engine.routing import Routing
from tercet.engine.scheduler_line import SchedulerLine
from tercet.ipc.process_messages import Mending, SchedulerRestarted, ToChild
from tercet.ipc.sockets import Outbox
from tercet.ipc.step_messages import Submit


class Schedulers:
    """One line for each replica, in their order."""

    def __init__(self, lines: Sequence[SchedulerLine], routing: Routing, desk: FrontDesk) -> None:
        self._lines = lines
        self._routing = routing
        self._desk = desk
        self._mending: frozenset[int] = frozenset()

    def submit(self, asked: Asked, submit: Submit) -> bool:
        """Whether it could be sent; not to a scheduler that is far behind."""
        replica = self._choose(submit) if len(self._lines) > 1 else 0
        self._desk.outstanding.place(asked, replica)
        return self._lines[replica].submit(submit)

    def _choose(self, submit: Submit) -> int:
        salt = submit.cache_salt, submit.sampling.adapter_load
        return self._routing.choose(submit.prompt_ids, salt, self._desk.outstanding.tokens, self._mending)

    def abort(self, lives: Iterable[Live]) -> None:
        """Those that were submitted anywhere: now, or later with others."""
        for live in lives:
            if live.asked.replica is not None:
                self._lines[live.asked.replica].note_abort(live.number)
        for line in self._lines:
            line.send_aborts()

    def forget(self, before: int) -> None:
        """Requests of lower numbers are nobody's."""
        for line in self._lines:
            line.forget(before)

    def obey(self, command: ToChild) -> None:
        """What the supervisor says of replicas."""
        match command:
            case SchedulerRestarted(replica=replica):
                self._lines[replica].succeed()
            case Mending(replicas=replicas):
                # Whichever process it is that they lack, what they had cached is gone.
                for replica in set(replicas) - self._mending:
                    self._routing.forget(replica)
                self._mending = frozenset(replicas)
            case _:
                raise AssertionError(f"the link keeps {command!r} to itself")

    async def follow(self) -> None:
        """To each new scheduler: all that is live with its replica, from where it stands."""
        async with anyio.create_task_group() as tasks:
            for replica, line in enumerate(self._lines):
                tasks.start_soon(line.follow, self._desk, replica)

    def close(self) -> None:
        for line in self._lines:
            line.close()


def make_schedulers(spec: ChildSpec, context: "zmq.Context[zmq.Socket[bytes]]", desk: FrontDesk) -> Schedulers:
    """For the tokenizer of this spec. Called inside a running event loop."""
    replicas = spec.addresses.replicas
    lines = [SchedulerLine(partial(Outbox, replica.scheduler, context)) for replica in replicas]
    return Schedulers(lines, Routing(len(replicas), looks_at_prefixes=spec.config.enable_prefix_caching), desk)
