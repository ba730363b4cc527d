"""An engine owned by this program: a supervisor in a process of its own, ended when its owner ends.

`LLM`, `scripts/chat.py` and the benchmarks use it. The supervisor is started as a program and not forked, so the owner
needs no `if __name__ == "__main__"` and may have threads, event loops and signal handlers of its own.
"""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import msgspec

from tercet.engine.config import EngineConfig
from tercet.engine.errors import StartupFailed
from tercet.engine.own_program import own_program
from tercet.ipc.process_messages import FromSupervisor, LastWords, Limits, Progress, Ready

_END_SECONDS = 10.0


class EngineProcess:
    """Starts an engine and waits until it serves. A context manager; `close` may be called twice.

    A fork of this program has our end of the engine's pipes too, so their end is not what we rely on.
    """

    def __init__(self, config: EngineConfig, report: Callable[[Progress], None] = lambda progress: None) -> None:
        self._owner = os.getpid()
        self._started = time.monotonic()
        self._closing = False
        self._on_death: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self.death: str | None = None
        """Why the engine ended, once it has ended by itself."""
        self.process = subprocess.Popen(
            own_program("owned_supervisor"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._tell(msgspec.json.encode(config))
            self._ready = self._wait_ready(report)
            self.startup_seconds = time.monotonic() - self._started
            """From the call until a request would be served."""
        except BaseException:
            self.close()
            self._close_reports()
            raise
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._ready.listen[0]

    @property
    def limits(self) -> Limits:
        return self._ready.limits

    @property
    def start_phases(self) -> dict[str, float]:
        """What the seconds went to, in order."""
        return {"launch": self.startup_seconds - self._ready.seconds, **self._ready.phases}

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called, in a thread of ours, with the reason, if the engine ends by itself.

        If it has ended already, it is called now; if that happens just now, twice.
        """
        self._on_death = callback
        if self.death is not None:
            callback(self.death)

    def close(self) -> None:
        """End the engine and wait for its end. In a fork of the program that started it, it does nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closing = True
            stdin = self.process.stdin
            assert stdin is not None
            if not stdin.closed:
                self._tell(b"stop\nstop")
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
            self._wait(_END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_ready(self, report: Callable[[Progress], None]) -> Ready:
        for message in self._messages():
            match message:
                case Progress():
                    report(message)
                case Ready():
                    return message
                case LastWords(message=words):
                    raise StartupFailed(words)
        raise StartupFailed(f"the supervisor ended with exit code {self.process.wait()} and no word")

    def _watch(self) -> None:
        for message in self._messages():
            if isinstance(message, LastWords):
                self.death = message.message
        self._close_reports()
        if not self._closing:
            self.death = self.death or f"the supervisor ended with exit code {self.process.wait()} and no word"
            if self._on_death is not None:
                self._on_death(self.death)

    def _messages(self) -> Iterator[FromSupervisor]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield msgspec.json.decode(line, type=FromSupervisor)

    def _close_reports(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def _wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children see its pipes close
            self.process.wait()
