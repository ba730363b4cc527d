"""The watch over an engine's processes once they serve: who hangs is killed, and who has died is started again.

It knows nothing of requests, nor how an engine starts and ends. A hang is a silence, and made a death.
"""

import time
from collections import defaultdict
from collections.abc import Callable

from tercet.engine.children import Child
from tercet.engine.config import EngineConfig
from tercet.engine.crew import Crew, common_limits
from tercet.engine.errors import StartupFailed, TercetError
from tercet.engine.log_line import log_line
from tercet.engine.restarts import Restarts
from tercet.engine.start_clock import in_words
from tercet.ipc.process_messages import Begin, Impaired, Limits, NewLimits, SchedulerRestarted, WorkersRestarted

_SETTLE_SECONDS = 0.05
"""From one worker's death until those of others that have the same cause have been seen."""


class ChildDied(TercetError):
    """A child ended and is not replaced; the message is its obituary."""


class Watch:
    """All processes of a role die and are replaced together."""

    def __init__(self, config: EngineConfig, crew: Crew, limits: Limits, spawn: Callable[[str, int], None]) -> None:
        """`limits`: what they began with. `spawn` starts the processes of a role, of an incarnation."""
        self._config = config
        self._crew = crew
        self._limits = limits
        self._spawn = spawn
        self._incarnation = 0
        self._restarts = defaultdict[str, Restarts](lambda: Restarts(config.max_restarts, config.restart_window))
        self._due: dict[str, float] = {}
        """When the processes of a role are to be started again."""
        self._arriving: dict[str, float] = {}
        """Until when the processes of a role, started again, have to serve."""
        self._impaired: tuple[str, ...] = ()
        """What the HTTP door was last told about `_due` and `_arriving`."""
        self._blame: str | None = None
        self._last_turn = 0.0
        self.draining = False
        """The tokenizer may end by itself, which it does when nothing is left to do."""
        self.drained = False
        """It has. Nobody is started again."""

    def turn(self, until: float) -> None:
        """Hear, judge silence, bury, start again. Raises `ChildDied` when it is enough."""
        beat = self._config.heartbeat_timeout / 5
        alarms = [until, time.monotonic() + beat, *self._due.values()]
        self._crew.wait(max(0.0, min(alarms) - time.monotonic()))
        now = time.monotonic()
        if now - self._last_turn > self._config.heartbeat_timeout / 2:  # it was this process that stood still
            for child in self._crew.children:
                child.last_heard = now
        self._last_turn = now
        if hung := [child for child in self._crew.children if child.is_silent(now, self._config.heartbeat_timeout)]:
            self._crew.kill_hung(hung)
        if self._crew.dead:
            self._bury(now)
        for role, due in list(self._due.items()):
            if due <= now:
                del self._due[role]
                self._arriving[role] = now + self._config.startup_timeout
                self._incarnation += 1
                try:
                    self._spawn(role, self._incarnation)
                except StartupFailed as lack:
                    self._put_off(role, str(lack), now)
        for role in list(self._arriving):
            self._help_to_arrive(role, now)
        self._tell_http()

    def keep_only(self, kept: str | None) -> None:
        """Of what has drained: the processes of all other roles end."""
        self._due.clear()
        self._arriving.clear()
        for role in {child.role for child in self._crew.children} - {kept}:
            self._crew.discard(role)

    def _tell_http(self) -> None:
        impaired = tuple(sorted(self._due.keys() | self._arriving.keys()))
        http = self._crew.only("http")
        if http is not None and http.serving and impaired != self._impaired:
            self._impaired = impaired
            http.tell(Impaired(impaired))

    def _bury(self, now: float) -> None:
        """Deal with the dead. Ranks that ran together end together: they would wait for each other for ever."""
        if any(child.role == "worker" for child in self._crew.dead):
            time.sleep(_SETTLE_SECONDS)
            self._crew.wait(0)
        dead = self._crew.take_dead()
        roles = {child.role: child for child in reversed(dead)}
        if "worker" in roles:
            cause = next((child for child in dead if child.role == "worker" and child.was_killed_from_outside), None)
            roles["worker"] = cause or roles["worker"]
            if roles["worker"].serving:  # else it has computed nothing, and what is said of those before it holds
                self._blame = None if cause else roles["worker"].obituary()
        for role, child in roles.items():
            self._replace(role, child, now)
        if "scheduler" in roles and self._config.tensor_parallel_size > 1 and "worker" not in self._due:
            # It may have died between telling one rank and telling the next.
            self._crew.discard("worker")
            self._due["worker"], self._blame = now, None

    def _replace(self, role: str, child: Child, now: float) -> None:
        if role == "tokenizer" and self.draining and child.process.returncode == 0:
            self.drained = True
        elif not self.drained:
            self._put_off(role, child.obituary(), now)
        elif child.process.returncode != 0:
            log_line(f"tercet: {child.obituary()}")
        self._crew.discard(role)

    def _put_off(self, role: str, why: str, now: float) -> None:
        """All processes of a role end, and are due again after a while."""
        self._crew.discard(role)
        self._arriving.pop(role, None)
        delay = self._restarts[role].died(now)
        if delay is None:
            raise ChildDied(f"{why}; {self._restarts[role].verdict}")
        self._due[role] = now + delay
        log_line(f"tercet: {why}; starting it again")

    def _help_to_arrive(self, role: str, now: float) -> None:
        """Let replaced processes begin once they are all loaded, and tell those whom it concerns once they serve."""
        children = self._crew.of(role)
        if now > self._arriving[role] and not all(child.serving for child in children):
            raise ChildDied(f"{role} did not come back within --startup-timeout {self._config.startup_timeout:g} s")
        if not all(child.loaded for child in children):
            return
        if role == "worker":
            self._limits = common_limits(children)
        for child in children:
            if not child.begun:
                child.begun = True
                child.tell(Begin(self._limits))
        if not all(child.serving for child in children):
            return
        del self._arriving[role]
        scheduler, tokenizer = self._crew.only("scheduler"), self._crew.only("tokenizer")
        if role == "worker" and tokenizer is not None:
            tokenizer.tell(NewLimits(self._limits))
        if role == "worker" and scheduler is not None:
            self._incarnation += 1
            scheduler.tell(WorkersRestarted(self._incarnation, self._limits, self._blame))
            log_line(f"tercet: worker 0 is back; it took {in_words(children[0].phases)}")
        elif role == "http":
            self._impaired = ()  # the new one knows nothing
        elif role == "scheduler" and tokenizer is not None:
            tokenizer.tell(SchedulerRestarted())
