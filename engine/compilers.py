"""A worker's compilers: as many processes as there are cores, so that kernels are there before the first is launched.

Nothing depends on them: what they leave out, or all if they fail, is compiled when it is launched. That they have been
through is noted beside the kernels, under a name that says for what, and the next start does without. Knows processes
and files; what is compiled, `compiler_process.py` knows.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tercet.engine.compiler_process import CompilerSpec
from tercet.engine.own_program import own_program

_MOST = 16
_BYTES_EACH = 3 * 2**29
_MOST_SECONDS = 600.0

Progress = Callable[[int, int], None]
"""Called with compilers that are through, and all."""


class Compilers:
    """They run until `wait`, or until this process ends."""

    def __init__(self, spec: CompilerSpec, note: Path) -> None:
        self._note = note
        self._claims = tempfile.TemporaryDirectory(prefix="tercet-compilers-")
        self._processes = [_start(spec, self._claims.name) for _ in range(_how_many())]

    def wait(self, progress: Progress) -> None:
        """Until all are through, or have taken too long."""
        deadline = time.monotonic() + _MOST_SECONDS
        progress(0, len(self._processes))
        for done, process in enumerate(self._processes, 1):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            progress(done, len(self._processes))
        self._claims.cleanup()
        if all(process.returncode == 0 for process in self._processes):
            with contextlib.suppress(OSError):  # a cache that is not ours to write
                self._note.touch()


def start_compilers(spec: CompilerSpec, cache: Path, fingerprint: str) -> Compilers | None:
    """None if they have been through. `cache`: where Triton keeps kernels; `fingerprint`: of all that makes them."""
    note = cache / f"tercet-{fingerprint}"
    return None if note.exists() else Compilers(spec, note)


def _start(spec: CompilerSpec, claims: str) -> subprocess.Popen[bytes]:
    command = own_program("compiler_process", claims)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its status says what became of it
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.close()
    return process


def _how_many() -> int:
    """Each reads torch and Triton, and needs a core."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)), _free_bytes() // _BYTES_EACH))


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
