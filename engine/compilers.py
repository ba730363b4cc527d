"""A worker's compiler: as many processes as there are cores, so that kernels are there before the first is launched.

Of workers that want the same kernels at the same time, as those of several replicas do, one has them compiled and the
others wait.
Nothing depends on them: what they leave out, or all if they fail, is compiled when it is launched. That they have been
through is noted beside the kernels, under a name that says for what, and the next start does without. Knows processes
and files; what is compiled, `compiler_process.py` knows.
"""

import contextlib
import fcntl
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from tercet.engine.compiler_process import DONE, CompilerSpec
from tercet.engine.own_program import own_program

_MOST = 16
_BYTES_EACH = 3 * 2**29
_MOST_SECONDS = 600.0
_LOOK_SECONDS = 0.05

Progress = Callable[[int, int], None]
"""Called with processes that are through, and all."""


class Compilers:
    """They run until `wait`, or until this process ends."""

    def __init__(self, spec: CompilerSpec, note: Path, lock: IO[bytes] | None) -> None:
        """`lock`: who has it locked compiles."""
        self._note = note
        self._lock = lock
        self._claims = tempfile.TemporaryDirectory(prefix="tercet-compilers-")
        self._how_many = _how_many()
        self._process = _start(spec, self._claims.name, self._how_many)

    def wait(self, progress: Progress) -> None:
        """Until all are through, or have taken too long."""
        deadline = time.monotonic() + _MOST_SECONDS
        progress(0, self._how_many)
        assert self._process.stdout is not None
        pipe, reports = self._process.stdout.fileno(), b""
        while len(reports) < self._how_many and select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (report := os.read(pipe, 1)):  # it has failed before it was many
                break
            reports += report
            progress(len(reports), self._how_many)
        self._process.kill()  # those that are not through end with it
        self._process.stdout.close()
        self._process.wait()
        self._claims.cleanup()
        if reports == DONE * self._how_many:
            with contextlib.suppress(OSError):  # a cache that is not ours to write
                self._note.touch()
        if self._lock is not None:
            self._lock.close()


class OthersCompilers:
    """Of another worker, that came first."""

    def __init__(self, lock: IO[bytes]) -> None:
        self._lock = lock

    def wait(self, progress: Progress) -> None:
        """Until they are through, or that worker has ended, or all has taken too long."""
        deadline = time.monotonic() + _MOST_SECONDS
        progress(0, 1)
        while not _has_locked(self._lock) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        self._lock.close()
        progress(1, 1)


def start_compilers(spec: CompilerSpec, cache: Path, fingerprint: str) -> Compilers | OthersCompilers | None:
    """None if they have been through. `cache`: where Triton keeps kernels; `fingerprint`: of all that makes them."""
    note = cache / f"tercet-{fingerprint}"
    if note.exists():
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f".tercet-{fingerprint}.lock").open("wb")
    except OSError:  # a cache that is not ours to write
        return Compilers(spec, note, None)
    if not _has_locked(lock):
        return OthersCompilers(lock)
    if note.exists():  # by now
        lock.close()
        return None
    return Compilers(spec, note, lock)


def _has_locked(lock: IO[bytes]) -> bool:
    """Whether it is ours now, until it is closed or this process ends. Where files cannot be locked everybody has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _start(spec: CompilerSpec, claims: str, how_many: int) -> subprocess.Popen[bytes]:
    command = own_program("compiler_process", claims, str(how_many))
    # Processes are forked: a library's threads would not be there in the copies.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its status says what became of it
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.close()
    return process


def _how_many() -> int:
    """Each needs a core and memory."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)), _free_bytes() // _BYTES_EACH))


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
