"""PROCESS supervisor: starts the others, waits for them with a deadline, has them watched (`watch.py`), ends them.

It knows nothing of requests. It talks to each child over the child's own pipes (`child.py`), so that a death is an
event here and not a silence: a process file descriptor becomes readable, whatever killed the child.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable

from tercet.engine.adapter_names import read_adapters
from tercet.engine.bytecode import keep_bytecode
from tercet.engine.changes import Changes
from tercet.engine.child import Paths, remove_sockets, remove_stale_sockets
from tercet.engine.children import Child, Post
from tercet.engine.config import EngineConfig
from tercet.engine.crew import Crew, common_limits, least_limits
from tercet.engine.errors import StartupFailed
from tercet.engine.free_memory import check_host_memory
from tercet.engine.home import have_home
from tercet.engine.model_files import locate
from tercet.engine.refusal import SHUTTING_DOWN
from tercet.engine.watch import HTTP, TOKENIZER, ChildDied, Watch
from tercet.ipc.addresses import Addresses, make_addresses
from tercet.ipc.process_messages import (
    Abandon,
    Beat,
    Begin,
    Drain,
    FromChild,
    FromSupervisor,
    HandOver,
    LastWords,
    Loaded,
    Order,
    Phase,
    Progress,
    Ready,
    Serving,
    Tried,
)

_ROLES = ("worker", "scheduler", "tokenizer", "http")
"""In the order of their start."""
_FAREWELL_SECONDS = 2.0
"""How long the tokenizer gets to tell its clients that the engine has died."""


class Supervisor:
    """Runs one engine from start to end. `report` gets progress and the one `Ready`."""

    def __init__(self, config: EngineConfig, report: Callable[[FromSupervisor], None]) -> None:
        self._config = config
        self._report = report
        self._crew = Crew(config, self._hear)
        self._addresses: Addresses | None = None
        self._changes: Changes | None = None
        self._posts = [
            Post(role, replica)
            for role in _ROLES
            if role != "http" or config.http is not None
            for replica in range(config.data_parallel_size if role in ("worker", "scheduler") else 1)
        ]
        self._stops = 0
        """Times somebody asked for the end: the first drains, the second ends at once."""
        self._started = time.monotonic()

    def stop(self) -> None:
        """Ask for the end. Safe in signal handlers and other threads."""
        self._stops += 1
        self._crew.wake()

    @property
    def is_fetching(self) -> bool:
        """Whether the model, or what goes with it, is still looked for, by libraries that know of no `stop`; nothing
        else has begun then."""
        return self._changes is None

    def run(self) -> None:
        """Start, serve until stopped, end. Raises `TercetError` when the engine did not start or died."""
        try:
            watch = self._start()
            if watch is not None:
                while not self._stops:
                    self._turn(watch, time.monotonic() + 3600)
                self._drain(watch)
            self._bid_farewell(SHUTTING_DOWN, "draining")
        except ChildDied as death:
            self._bid_farewell(str(death))
            raise
        finally:
            self._end_children()

    # -------------------------------------------------------------------------------------------- start

    def _start(self) -> Watch | None:
        """All serve, and are to be watched; None if somebody has asked for the end meanwhile."""
        deadline = self._started + self._config.startup_timeout
        have_home(compiles=self._config.device != "cpu")
        check_host_memory(self._config)
        keep_bytecode()
        model, adapters = str(locate(self._config.model)), read_adapters(self._config.adapter)
        folders = tuple(str(locate(folder, name)) for name, folder in adapters.items())
        guesser = self._config.speculative_config and self._config.speculative_config.model
        paths = Paths(model, adapters=folders, guesser=str(locate(guesser)) if guesser else None)
        self._changes = Changes(self._config, self._crew, paths)
        try:
            config = self._config
            self._addresses = make_addresses(
                config.tensor_parallel_size,
                config.listen,
                keyed=config.listen_key is not None,
                num_replicas=config.data_parallel_size,
            )
        except (ValueError, OSError) as error:
            raise StartupFailed(f"no folder can be made for the engine's own sockets: {error}") from None
        before = time.monotonic() - self._started
        for post in self._posts:
            self._spawn(post)
        if not self._have_all("load", lambda child: child.loaded is not None, deadline):
            return None
        workers = [self._crew.of(post) for post in self._posts if post.role == "worker"]
        limits_each = [common_limits(children) for children in workers]
        limits = least_limits(limits_each)
        for child in self._crew.children:
            child.begun = True
            child.tell(Begin(limits if child.post in (TOKENIZER, HTTP) else limits_each[child.post.replica]))
        if not self._have_all("begin to serve", lambda child: child.serving, deadline):
            return None
        model = self._config.served_model_name or self._config.model
        seconds = time.monotonic() - self._started
        phases = {"supervisor": before, **workers[0][0].phases}
        phases["others"] = seconds - sum(phases.values())
        self._report(Ready(self._addresses.listen, model, seconds, limits, phases))
        return Watch(self._config, self._crew, limits_each, self._spawn)

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

    def _spawn(self, post: Post, incarnation: int = 0) -> None:
        assert self._addresses is not None
        assert self._changes is not None
        self._crew.spawn(post, self._changes.paths, self._addresses, incarnation)
        for child in self._crew.of(post):
            self._changes.tell(child)
        if self._stops:
            self._tell_doors_to_drain(post)

    def _tell_doors_to_drain(self, *posts: Post) -> None:
        for child in self._crew.children:
            if child.post in posts and child.post in (HTTP, TOKENIZER):
                child.tell(Drain())

    def _turn(self, watch: Watch, until: float) -> None:
        """Watch, and make what changes are asked for."""
        assert self._changes is not None
        watch.turn(until)
        self._changes.turn(watch)

    # ---------------------------------------------------------------------------------------------- end

    def _drain(self, watch: Watch) -> None:
        """Let running requests finish, up to the deadline or a second `stop`; who dies meanwhile is replaced."""
        watch.draining = True
        self._tell_doors_to_drain(*self._posts)
        deadline = time.monotonic() + self._config.drain_timeout
        while not watch.drained and self._stops < 2 and time.monotonic() < deadline:
            self._turn(watch, deadline)
        if watch.drained:
            self._hand_over(watch, deadline)

    def _hand_over(self, watch: Watch, deadline: float) -> None:
        """All has been said; clients of the HTTP door still take it. For that it needs nobody: memory becomes free."""
        http = self._crew.only(HTTP)
        if http is not None and http.serving:
            http.tell(HandOver(max(0.0, deadline - time.monotonic())))
            watch.keep_only(HTTP)
        else:
            watch.keep_only(None)
        while self._crew.only(HTTP) is not None and self._stops < 2 and time.monotonic() < deadline:
            watch.turn(deadline)
        if self._stops > 1:
            self._crew.discard(HTTP)

    def _bid_farewell(self, message: str, code: str = "engine_died") -> None:
        """Have the tokenizer fail what is live, so that no client waits; then the HTTP door, which passes it on."""
        for child in (self._crew.only(TOKENIZER), self._crew.only(HTTP)):
            if child is not None and child.serving and child.process.poll() is None:
                child.tell(Abandon(message, code))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(_FAREWELL_SECONDS)

    def _end_children(self) -> None:
        self._crew.end()
        if self._addresses is not None:
            remove_sockets(self._addresses, front_doors=False)
            remove_stale_sockets(self._addresses.listen)  # another engine may listen there, before us or by now

    # ------------------------------------------------------------------------------------------- events

    def _hear(self, child: Child, message: FromChild) -> None:
        match message:
            case Phase(what=what, done=done, total=total):
                self._report(Progress(child.name, what, done, total))
            case Serving():
                child.serving = True
            case LastWords(message=words):
                child.last_words = words
            case Order() as order:
                assert self._changes is not None
                self._changes.order(child, order)
            case Tried() as tried:
                assert self._changes is not None
                self._changes.note(child, tried)
            case Loaded() | Beat():
                pass  # that it was heard is what counts
