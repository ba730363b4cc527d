"""One child process as its supervisor sees it: its pipes, what it has said, how it ended.

It knows nothing of what the child does, nor of other children.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tercet.engine.child import GROUP_SIGNALS, ChildSpec
from tercet.engine.errors import StartupFailed
from tercet.engine.log_line import log_line
from tercet.engine.own_program import own_program
from tercet.engine.system_limits import with_advice
from tercet.ipc.process_messages import FromChild, Loaded, ToChild

_STDERR_LINES_KEPT = 20
_BUSY_GRACE = 30.0
"""A worker on the CPU may compute one step for so many times the heartbeat deadline, as long as it does compute."""


class Post(NamedTuple):
    """What the processes that die and are replaced together do."""

    role: str
    replica: int = 0
    """Of a scheduler and of workers."""


class Child:
    """One child process, from its start to its reaping."""

    def __init__(self, spec: ChildSpec) -> None:
        self.post = Post(spec.process, spec.replica)
        self.name = spec.name
        self.loaded: Loaded | None = None
        self.phases: dict[str, float] = {}
        """What it did from its start until it was loaded, and the seconds of each."""
        self.begun = False
        """It was told to begin."""
        self.serving = False
        self.hung = False
        """It was killed because it was silent."""
        self.last_words: str | None = None
        self.last_heard = self._spawned = time.monotonic()
        self._cpu_seconds = 0.0
        self._last_busy = self.last_heard
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_LINES_KEPT)
        # No environment, and its name for whoever lists processes: the spec goes through the pipe whose end is the
        # supervisor's death notice.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # in the child, until it ignores them
        try:
            self.process = subprocess.Popen(
                own_program(spec.process, spec.name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.pidfd = self._open_pidfd()
        except OSError as error:
            raise StartupFailed(f"{self.name} cannot be started: {with_advice(str(error))}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._readers: list[LineReader] = []
        self._reaped = False
        self._write(msgspec.json.encode(spec))

    def _open_pidfd(self) -> int:
        try:
            return os.pidfd_open(self.process.pid)
        except OSError:
            self.process.kill()
            self.process.wait()
            raise

    def tell(self, command: ToChild) -> None:
        """Send a command; a child that is gone is noticed elsewhere."""
        self._write(msgspec.json.encode(command))

    def watch(
        self,
        selector: selectors.BaseSelector,
        hear: Callable[["Child", FromChild], None],
        gone: Callable[["Child"], None],
    ) -> None:
        """Have the selector call `hear` with each report, and `gone` once it has ended."""
        stdout, stderr = self.process.stdout, self.process.stderr
        assert stdout is not None
        assert stderr is not None
        decoder = msgspec.json.Decoder(FromChild)
        reports = LineReader(stdout.fileno(), lambda line: self._hear(decoder.decode(line), hear))
        prints = LineReader(stderr.fileno(), self._echo)
        self._readers = [reports, prints]
        selector.register(stdout, selectors.EVENT_READ, reports.read)
        selector.register(stderr, selectors.EVENT_READ, prints.read)
        selector.register(self.pidfd, selectors.EVENT_READ, lambda: gone(self))

    def reap(self, selector: selectors.BaseSelector) -> None:
        """Wait for its end, after it was killed or was seen to end; hear its last words, close everything. Once."""
        if self._reaped:
            return
        self._reaped = True
        self.process.wait()
        for reader in self._readers:
            reader.read()
        for file in (self.pidfd, self.process.stdout, self.process.stderr):
            with contextlib.suppress(KeyError, ValueError):  # it was never watched
                if file is not None:
                    selector.unregister(file)
        os.close(self.pidfd)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a command that the dead child never read
                    pipe.close()

    def is_silent(self, now: float, timeout: float) -> bool:
        """Whether it has not beaten for `timeout` seconds although it should.

        One step of a large model on a CPU may take minutes: a worker there also has to be idle to count as hung.
        """
        if not self.serving:
            return False
        silence = now - self.last_heard
        if self.loaded is None or self.loaded.limits is None or self.loaded.limits.device == "cuda":
            return silence > timeout
        used, is_runnable = _activity(self.process.pid)
        if used > self._cpu_seconds or is_runnable:
            self._cpu_seconds, self._last_busy = used, now
        idle = now - max(self._last_busy, self.last_heard)
        return idle > timeout or silence > _BUSY_GRACE * timeout

    def obituary(self) -> str:
        """Why it ended: its own words if it left any, else how it ended and what it printed last."""
        if self.hung:
            return f"{self.name} hung: it said nothing for {time.monotonic() - self.last_heard:.0f} s and was killed"
        if self.last_words is not None:
            return f"{self.name}: {with_advice(self.last_words)}"
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        tail = "".join(f"\n  {line}" for line in self._stderr_tail)
        return f"{self.name} {how}" + (f"; it printed last:{with_advice(tail)}" if tail else "")

    @property
    def was_killed_from_outside(self) -> bool:
        """Whether what it computed cannot be to blame for its end."""
        return not self.hung and self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)

    def _hear(self, message: FromChild, hear: Callable[["Child", FromChild], None]) -> None:
        self.last_heard = time.monotonic()
        if isinstance(message, Loaded):
            python = self.last_heard - self._spawned - sum(message.phases.values())
            self.loaded, self.phases = message, {"python": python, **message.phases}
        hear(self, message)

    def _echo(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._stderr_tail.append(text)
        log_line(f"[{self.name}] {text}")

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass


class LineReader:
    """Cuts what a non-blocking pipe brings into lines."""

    def __init__(self, fd: int, on_line: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
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


def _activity(pid: int) -> tuple[float, bool]:
    """Processor time that a process has used, and whether it waits for nothing but a processor."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:  # it is gone
        return 0.0, False
    return float(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == b"R"
