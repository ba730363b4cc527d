"""A child's link to its supervisor: two pipes, one JSON line a message.

Standard input brings the `ChildSpec` and then commands; its end means that the supervisor is gone, whatever killed it,
and the child exits at once, even if its main thread hangs. Standard output carries the child's reports; what
libraries print is sent to standard error instead. Pipes and not sockets, because a pipe's end is the death notice.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from tercet.engine.config import EngineConfig
from tercet.engine.errors import TercetError
from tercet.engine.system_limits import make_room_for_files
from tercet.ipc.addresses import Addresses, Replica
from tercet.ipc.process_messages import Beat, Begin, FromChild, LastWords, Limits, ToChild
from tercet.ipc.sockets import clear_stale_file

_PR_SET_PDEATHSIG = 1
SAY_WHERE = signal.SIGUSR1
"""On it a child prints the stacks of all its threads, even if none of them runs Python code any more."""
GROUP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""A terminal's and a service manager's, which reach the whole group; only whoever they have started acts on them."""


class Paths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """On this machine, what an engine's configuration names as users do."""

    model: str
    """Folder or .gguf file."""
    weights: str | None = None
    """The same, of the weights, if they are others than the model's first."""
    adapters: tuple[str | None, ...] = ()
    """Folders, by place; at the start in the order of config.adapter. None: nothing is there."""
    guesser: str | None = None
    """Folder of a checkpoint whose layer guesses tokens."""


class ChildSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a child is and where it finds the others."""

    process: str
    """tokenizer, scheduler, worker or http."""
    rank: int
    config: EngineConfig
    paths: Paths
    addresses: Addresses
    incarnation: int = 0
    """Counts up with every process that is started in place of another: what bears a lower count is of the dead."""
    replica: int = 0
    """Which one a scheduler or a worker is of."""

    @property
    def own(self) -> Replica:
        """Where the processes of its replica meet."""
        return self.addresses.replicas[self.replica]

    @property
    def name(self) -> str:
        """For people."""
        name = f"worker {self.rank}" if self.process == "worker" else self.process
        is_one_of_several = self.config.data_parallel_size > 1 and self.process in ("scheduler", "worker")
        return f"replica {self.replica} {name}" if is_one_of_several else name

    @property
    def lane(self) -> str:
        """The same for names of files."""
        parts = [self.process]
        if self.config.data_parallel_size > 1:
            parts.append(str(self.replica))
        if self.process == "worker":
            parts.append(str(self.rank))
        return "-".join(parts)


class SupervisorLink:
    """What a child tells its supervisor and hears from it."""

    def __init__(self, spec: ChildSpec, commands: IO[bytes], reports: IO[bytes]) -> None:
        self.spec = spec
        self.bound = False
        """Whether this process has bound the addresses that clients know."""
        self._reports = reports
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._limits: Limits | None = None
        self._pending: list[ToChild] = []
        self._callback: Callable[[ToChild], None] | None = None
        self.beat_seconds = min(1.0, spec.config.heartbeat_timeout / 5)
        """How often the process's loop is to call `beat`."""
        self._last_beat = 0.0
        threading.Thread(target=self._listen, args=(commands,), name="supervisor-link", daemon=True).start()

    def tell(self, message: FromChild) -> None:
        """Report to the supervisor; any thread may. A supervisor that is gone hears nothing, and ends us soon."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock:
            try:
                self._reports.write(line)
                self._reports.flush()
            except BrokenPipeError:
                pass

    def beat(self, count: int) -> None:
        """Say that the process's own loop turns; may be called as often as it does."""
        now = time.monotonic()
        if now - self._last_beat >= self.beat_seconds:
            self._last_beat = now
            self.tell(Beat(count))

    def wait_begin(self) -> Limits:
        """Block until the supervisor says `Begin`. The supervisor keeps the deadline."""
        self._begun.wait()
        # What is loaded by now stays until the end. Left to the garbage collector, it would be walked again and again,
        # all threads standing still: 170 ms each time in a worker, for torch alone.
        gc.freeze()
        gc.enable()
        assert self._limits is not None
        return self._limits

    def subscribe(self, callback: Callable[[ToChild], None]) -> None:
        """Call `callback`, in the link's own thread, for each command but `Begin`, those of the past included."""
        with self._lock:
            self._callback = callback
            pending, self._pending = self._pending, []
        for command in pending:
            callback(command)

    def _listen(self, commands: IO[bytes]) -> None:
        decoder = msgspec.json.Decoder(ToChild)
        for line in commands:
            command = decoder.decode(line)
            if isinstance(command, Begin):
                self._limits = command.limits
                self._begun.set()
                continue
            with self._lock:
                callback = self._callback
                if callback is None:
                    self._pending.append(command)
            if callback is not None:
                callback(command)
        remove_sockets(self.spec.addresses, front_doors=self.spec.process == "tokenizer" and self.bound)
        os._exit(1)


def remove_sockets(addresses: Addresses, *, front_doors: bool) -> None:
    """Remove the socket files of an engine that has ended; what is gone already is fine.

    `front_doors` only if the engine did bind them: a file of that name may belong to another engine.
    """
    shutil.rmtree(addresses.directory, ignore_errors=True)
    for address in addresses.listen:
        if front_doors and address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def remove_stale_sockets(listen: tuple[str, ...]) -> None:
    """Remove those at which nobody listens any more."""
    for address in listen:
        if address.startswith("ipc://"):
            with contextlib.suppress(OSError):
                clear_stale_file(address)


def ignore_group_signals() -> None:
    """Also those that have come since this process was started with them blocked."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def die_with_parent() -> None:
    """At once, whatever this process is doing then: not even the interpreter is asked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(main: Callable[[SupervisorLink], None]) -> None:
    """Be a child process: read the spec, run `main`, and turn whatever it raises into last words and exit code 1."""
    # What a start makes, it keeps: until `wait_begin` there is nothing to collect, and torch is large to walk.
    gc.disable()
    ignore_group_signals()
    faulthandler.register(SAY_WHERE)
    make_room_for_files()
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Not sys.stdin: the interpreter closes that at its end, and dies of it while the link's thread is reading.
    commands = os.fdopen(os.dup(0), "rb")
    spec = msgspec.json.decode(commands.readline(), type=ChildSpec)
    if spec.process == "worker":
        # A worker may hang inside a driver call that holds the interpreter; then only the kernel can end it.
        die_with_parent()
    try:
        link = SupervisorLink(spec, commands, reports)
    except RuntimeError as error:  # no room for its thread
        reports.write(msgspec.json.encode(LastWords(message=str(error))) + b"\n")
        reports.close()
        sys.exit(1)
    try:
        main(link)
    except TercetError as error:  # said on purpose: the message is all there is to know
        link.tell(LastWords(message=str(error)))
        sys.exit(1)
    except BaseException as error:
        link.tell(LastWords(message=f"{type(error).__name__}: {error}"))
        raise
