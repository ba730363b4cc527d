"""PROCESS supervisor: starts the others, waits for them with a deadline, watches them, replaces the dead, ends them.

It knows nothing of requests. It talks to each child over the child's own pipes (`child.py`), so that a death is an
event here and not a silence: a process file descriptor becomes readable, whatever killed the child. A hang is a
silence, and made a death.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable

from tercet.engine.bytecode import keep_bytecode
from tercet.engine.child import remove_sockets, remove_stale_sockets
from tercet.engine.children import Child
from tercet.engine.config import EngineConfig
from tercet.engine.crew import Crew, common_limits
from tercet.engine.errors import StartupFailed, TercetError
from tercet.engine.home import have_home
from tercet.engine.log_line import log_line
from tercet.engine.model_files import locate
from tercet.engine.restarts import Restarts
from tercet.engine.start_clock import in_words
from tercet.ipc.addresses import Addresses, make_addresses
from tercet.ipc.process_messages import (
    Abandon,
    Beat,
    Begin,
    Drain,
    FromChild,
    FromSupervisor,
    Impaired,
    LastWords,
    Limits,
    Loaded,
    NewLimits,
    Phase,
    Progress,
    Ready,
    SchedulerRestarted,
    Serving,
    WorkersRestarted,
)

_ROLES = ("worker", "scheduler", "tokenizer", "http")
"""In the order of their start. All processes of a role die and are replaced together."""
_FAREWELL_SECONDS = 2.0
"""How long the tokenizer gets to tell its clients that the engine has died."""
_SETTLE_SECONDS = 0.05
"""From one worker's death until those of others that have the same cause have been seen."""


class ChildDied(TercetError):
    """A child ended and is not replaced; the message is its obituary."""


class Supervisor:
    """Runs one engine from start to end. `report` gets progress and the one `Ready`."""

    def __init__(self, config: EngineConfig, report: Callable[[FromSupervisor], None]) -> None:
        self._config = config
        self._report = report
        self._crew = Crew(config, self._hear)
        self._addresses: Addresses | None = None
        self._model_path = ""
        self._limits: Limits | None = None
        self._incarnation = 0
        self._roles = tuple(role for role in _ROLES if role != "http" or config.http is not None)
        self._restarts = {role: Restarts(config.max_restarts, config.restart_window) for role in self._roles}
        self._due: dict[str, float] = {}
        """When the processes of a role are to be started again."""
        self._arriving: dict[str, float] = {}
        """Until when the processes of a role, started again, have to serve."""
        self._impaired: tuple[str, ...] = ()
        """What the HTTP door was last told about `_due` and `_arriving`."""
        self._blame: str | None = None
        self._last_turn = 0.0
        self._drained = False
        """The tokenizer has ended because nothing was left to do."""
        self._stops = 0
        """Times somebody asked for the end: the first drains, the second ends at once."""
        self._started = time.monotonic()

    def stop(self) -> None:
        """Ask for the end. Safe in signal handlers and other threads."""
        self._stops += 1
        self._crew.wake()

    @property
    def is_fetching(self) -> bool:
        """Whether the model is still looked for, by libraries that know of no `stop`; nothing else has begun then."""
        return not self._model_path

    def run(self) -> None:
        """Start, serve until stopped, end. Raises `TercetError` when the engine did not start or died."""
        try:
            if self._start():
                while not self._stops:
                    self._watch_over(time.monotonic() + 3600)
                self._drain()
            self._bid_farewell("the engine is shutting down", "draining")
        except ChildDied as death:
            self._bid_farewell(str(death))
            raise
        finally:
            self._end_children()

    # -------------------------------------------------------------------------------------------- start

    def _start(self) -> bool:
        """Whether all serve; if not, somebody has asked for the end meanwhile."""
        deadline = self._started + self._config.startup_timeout
        have_home(compiles=self._config.device != "cpu")
        keep_bytecode()
        self._model_path = str(locate(self._config.model))
        try:
            size, listen, key = self._config.tensor_parallel_size, self._config.listen, self._config.listen_key
            self._addresses = make_addresses(size, listen, keyed=key is not None)
        except (ValueError, OSError) as error:
            raise StartupFailed(f"no folder can be made for the engine's own sockets: {error}") from None
        before = time.monotonic() - self._started
        for role in self._roles:
            self._spawn(role)
        if not self._have_all("load", lambda child: child.loaded is not None, deadline):
            return False
        self._limits = common_limits(self._crew.children)
        for child in self._crew.children:
            child.begun = True
            child.tell(Begin(self._limits))
        if not self._have_all("begin to serve", lambda child: child.serving, deadline):
            return False
        model = self._config.served_model_name or self._config.model
        seconds = time.monotonic() - self._started
        phases = {"supervisor": before, **self._crew.of("worker")[0].phases}
        phases["others"] = seconds - sum(phases.values())
        self._report(Ready(self._addresses.listen, model, seconds, self._limits, phases))
        return True

    def _have_all(self, what: str, has_done: Callable[[Child], bool], deadline: float) -> bool:
        """Wait until each child has done `what`; False if somebody asks for the end meanwhile."""
        while late := [child.name for child in self._crew.children if not has_done(child)]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise StartupFailed(
                    f"{', '.join(late)} did not {what} within --startup-timeout {self._config.startup_timeout:g} s"
                )
            self._crew.wait(remaining)
            if self._stops:
                return False
            if self._crew.dead:
                raise StartupFailed(self._crew.take_dead()[0].obituary())
        return True

    def _spawn(self, role: str) -> None:
        assert self._addresses is not None
        self._crew.spawn(role, self._model_path, self._addresses, self._incarnation)
        if self._stops:
            self._tell_doors_to_drain(role)

    def _tell_doors_to_drain(self, *roles: str) -> None:
        for child in self._crew.children:
            if child.role in roles and child.role in ("http", "tokenizer"):
                child.tell(Drain())

    # ---------------------------------------------------------------------------------------------- end

    def _drain(self) -> None:
        """Let running requests finish, up to the deadline or a second `stop`; who dies meanwhile is replaced."""
        self._tell_doors_to_drain(*self._roles)
        deadline = time.monotonic() + self._config.drain_timeout
        while not self._drained and self._stops < 2 and time.monotonic() < deadline:
            self._watch_over(deadline)

    def _bid_farewell(self, message: str, code: str = "engine_died") -> None:
        """Have the tokenizer fail what is live, so that no client waits; then the HTTP door, which passes it on."""
        for child in (self._crew.only("tokenizer"), self._crew.only("http")):
            if child is not None and child.serving and child.process.poll() is None:
                child.tell(Abandon(message, code))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(_FAREWELL_SECONDS)

    def _end_children(self) -> None:
        self._crew.end()
        if self._addresses is not None:
            remove_sockets(self._addresses, front_doors=False)
            remove_stale_sockets(self._addresses.listen)  # another engine may listen there, before us or by now

    # ------------------------------------------------------------------------------------------ replace

    def _watch_over(self, until: float) -> None:
        """One turn of the life of a started engine: hear, judge silence, bury, start again."""
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
                    self._spawn(role)
                except StartupFailed as lack:
                    self._put_off(role, str(lack), now)
        for role in list(self._arriving):
            self._help_to_arrive(role, now)
        self._tell_http()

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
        if role == "tokenizer" and self._stops and child.process.returncode == 0:
            self._crew.discard(role)
            self._drained = True
        else:
            self._put_off(role, child.obituary(), now)

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
        assert self._limits is not None
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

    # ------------------------------------------------------------------------------------------- events

    def _hear(self, child: Child, message: FromChild) -> None:
        match message:
            case Phase(what=what, done=done, total=total):
                self._report(Progress(child.name, what, done, total))
            case Serving():
                child.serving = True
            case LastWords(message=words):
                child.last_words = words
            case Loaded() | Beat():
                pass  # that it was heard is what counts
