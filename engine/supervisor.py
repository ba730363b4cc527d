"""PROCESS supervisor: starts the others, waits for them with a deadline, watches them, ends them.

It knows nothing of requests. It talks to each child over the child's own pipes (`child.py`), so that a death is an
event here and not a silence: a process file descriptor becomes readable, whatever killed the child.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import IO

import msgspec

from tercet.engine.child import ChildSpec, remove_sockets
from tercet.engine.config import EngineConfig
from tercet.engine.errors import StartupFailed, TercetError
from tercet.engine.model_files import locate
from tercet.ipc.addresses import Addresses, make_addresses
from tercet.ipc.messages import (
    Abandon,
    Beat,
    Begin,
    Drain,
    FromChild,
    FromSupervisor,
    LastWords,
    Limits,
    Loaded,
    Phase,
    Progress,
    Ready,
    Serving,
    ToChild,
)

_STDERR_LINES_KEPT = 20
_FAREWELL_SECONDS = 2.0
"""How long the tokenizer gets to tell its clients that the engine has died."""


class Child:
    """One child process and what it has said so far."""

    def __init__(self, spec: ChildSpec) -> None:
        self.name = f"worker {spec.rank}" if spec.process == "worker" else spec.process
        self.module = f"tercet.engine.{spec.process}"
        self.loaded: Loaded | None = None
        self.serving = False
        self.last_words: str | None = None
        self.stderr_tail: deque[str] = deque(maxlen=_STDERR_LINES_KEPT)
        # No arguments and no environment: the spec goes through the pipe whose end is the supervisor's death notice.
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        self._write(msgspec.json.encode(spec))

    def tell(self, command: ToChild) -> None:
        """Send a command; a child that is gone is noticed elsewhere."""
        self._write(msgspec.json.encode(command))

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def obituary(self) -> str:
        """Why it ended: its own words if it left any, else how it ended and what it printed last."""
        if self.last_words is not None:
            return f"{self.name}: {self.last_words}"
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        tail = "".join(f"\n  {line}" for line in self.stderr_tail)
        return f"{self.name} {how}" + (f"; it printed last:{tail}" if tail else "")


class ChildDied(TercetError):
    """A child ended that should not have; the message is its obituary."""


class Supervisor:
    """Runs one engine from start to end. `report` gets progress and the one `Ready`."""

    def __init__(self, config: EngineConfig, report: Callable[[FromSupervisor], None]) -> None:
        self._config = config
        self._report = report
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._addresses: Addresses | None = None
        self._stops = 0
        """Times somebody asked for the end: the first drains, the second ends at once."""
        self._started = time.monotonic()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakeups)

    def stop(self) -> None:
        """Ask for the end. Safe in signal handlers and other threads."""
        self._stops += 1
        with contextlib.suppress(OSError):  # it has ended already
            os.write(self._wake_write, b"x")

    def run(self) -> None:
        """Start, serve until stopped, end. Raises `TercetError` when the engine did not start or died."""
        try:
            self._start()
            while not self._asked_to_stop():
                self._wait_for_events(None)
            self._drain()
        except ChildDied as death:
            self._bid_farewell(str(death))
            raise
        finally:
            self._end_children()

    def _asked_to_stop(self) -> bool:
        return self._stops > 0

    def _start(self) -> None:
        deadline = self._started + self._config.startup_timeout
        model_path = locate(self._config.model)
        self._addresses = make_addresses(self._config.tensor_parallel_size, self._config.listen)
        ranks = range(self._config.tensor_parallel_size)
        for process, rank in [*(("worker", rank) for rank in ranks), ("scheduler", 0), ("tokenizer", 0)]:
            self._watch(Child(ChildSpec(process, rank, self._config, str(model_path), self._addresses)))
        self._wait_until(lambda: all(child.loaded for child in self._children), deadline, "load")
        if self._asked_to_stop():
            return
        limits = _common_limits(
            [child.loaded.limits for child in self._children if child.loaded and child.loaded.limits]
        )
        for child in self._children:
            child.tell(Begin(limits))
        self._wait_until(lambda: all(child.serving for child in self._children), deadline, "begin to serve")
        if self._asked_to_stop():
            return
        model = self._config.served_model_name or self._config.model
        self._report(Ready(self._addresses.listen, model, time.monotonic() - self._started, limits))

    def _wait_until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        while not condition() and not self._asked_to_stop():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                late = [c.name for c in self._children if not (c.serving if what != "load" else c.loaded)]
                raise StartupFailed(
                    f"{', '.join(late)} did not {what} within --startup-timeout {self._config.startup_timeout:g} s"
                )
            try:
                self._wait_for_events(remaining)
            except ChildDied as death:
                raise StartupFailed(str(death)) from None

    def _drain(self) -> None:
        """Let running requests finish, up to the deadline or a second call of `stop`."""
        tokenizer = next((child for child in self._children if child.module.endswith("tokenizer")), None)
        if tokenizer is None or not tokenizer.serving:
            return
        tokenizer.tell(Drain())
        deadline = time.monotonic() + self._config.drain_timeout
        while tokenizer.process.poll() is None and self._stops < 2 and time.monotonic() < deadline:
            self._wait_for_events(deadline - time.monotonic(), may_exit=tokenizer)
        if tokenizer.process.poll() is None:
            self._bid_farewell("the engine is shutting down")

    def _bid_farewell(self, message: str) -> None:
        """Have the tokenizer fail what is live, so that no client waits for an answer that never comes."""
        for child in self._children:
            if child.module.endswith("tokenizer") and child.process.poll() is None:
                child.tell(Abandon(message))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(_FAREWELL_SECONDS)

    def _end_children(self) -> None:
        for child in self._children:
            child.process.kill()  # they hold nothing that needs a goodbye: sockets are removed below
        for child in self._children:
            child.process.wait()
            os.close(child.pidfd)
            for pipe in (child.process.stdin, child.process.stdout, child.process.stderr):
                if pipe is not None:
                    _close_quietly(pipe)
        if self._addresses is not None:
            bound = any(child.loaded for child in self._children if child.module.endswith("tokenizer"))
            remove_sockets(self._addresses, front_doors=bound)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ------------------------------------------------------------------------------------------- events

    def _watch(self, child: Child) -> None:
        self._children.append(child)
        stdout, stderr = child.process.stdout, child.process.stderr
        assert stdout is not None
        assert stderr is not None
        os.set_blocking(stdout.fileno(), False)
        os.set_blocking(stderr.fileno(), False)
        reports = _LineReader(stdout.fileno(), partial(self._hear, child, msgspec.json.Decoder(FromChild)))
        prints = _LineReader(stderr.fileno(), partial(_echo, child))
        self._selector.register(stdout, selectors.EVENT_READ, reports.read)
        self._selector.register(stderr, selectors.EVENT_READ, prints.read)
        self._selector.register(child.pidfd, selectors.EVENT_READ, partial(self._mourn, child, [reports, prints]))

    def _wait_for_events(self, timeout: float | None, may_exit: Child | None = None) -> None:
        for key, _ in self._selector.select(timeout):
            try:
                key.data()
            except ChildDied:
                if may_exit is None or may_exit.process.returncode != 0:
                    raise

    def _drain_wakeups(self) -> None:
        os.read(self._wake_read, 4096)

    def _hear(self, child: Child, decoder: "msgspec.json.Decoder[FromChild]", line: bytes) -> None:
        match decoder.decode(line):
            case Phase(what=what, done=done, total=total):
                self._report(Progress(child.name, what, done, total))
            case Loaded() as loaded:
                child.loaded = loaded
            case Serving():
                child.serving = True
            case LastWords(message=message):
                child.last_words = message
            case Beat():
                pass  # restart on silence comes with the restart itself

    def _mourn(self, child: Child, readers: "list[_LineReader]") -> None:
        for reader in readers:  # what it said before it died
            reader.read()
        self._selector.unregister(child.pidfd)
        child.process.wait()
        raise ChildDied(child.obituary())


class _LineReader:
    """Cuts what a non-blocking pipe brings into lines."""

    def __init__(self, fd: int, on_line: Callable[[bytes], None]) -> None:
        self._fd = fd
        self._on_line = on_line
        self._rest = b""

    def read(self) -> None:
        try:
            while chunk := os.read(self._fd, 65536):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    self._on_line(line)
        except BlockingIOError:
            pass


def _echo(child: Child, line: bytes) -> None:
    text = line.decode(errors="replace")
    child.stderr_tail.append(text)
    print(f"[{child.name}] {text}", file=sys.stderr, flush=True)


def _close_quietly(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # a command that the dead child never read
        pipe.close()


def _common_limits(limits: list[Limits]) -> Limits:
    """What all ranks can do: the least of each."""
    assert limits
    return msgspec.structs.replace(
        limits[0],
        num_pages=min(one.num_pages for one in limits),
        max_model_len=min(one.max_model_len for one in limits),
    )


def main() -> None:
    """Be the supervisor of an engine that another program owns: settings on standard input, reports on output.

    The end of standard input means that the owner is gone, and ends the engine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the owner's terminal is the owner's to act on
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def report(message: FromSupervisor) -> None:
        try:
            reports.write(msgspec.json.encode(message) + b"\n")
            reports.flush()
        except BrokenPipeError:
            pass  # the owner is gone; its end of our standard input says so too

    # Not sys.stdin: the interpreter closes that at its end, and dies of it while the watching thread is reading.
    commands = os.fdopen(os.dup(0), "rb")
    config = msgspec.json.decode(commands.readline(), type=EngineConfig)
    supervisor = Supervisor(config, report)

    def watch_owner() -> None:
        for _ in commands:  # each line asks for the end: the first drains, the second is impatient
            supervisor.stop()
        supervisor.stop()
        supervisor.stop()

    threading.Thread(target=watch_owner, name="owner-watch", daemon=True).start()
    try:
        supervisor.run()
    except TercetError as error:
        report(LastWords(message=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
