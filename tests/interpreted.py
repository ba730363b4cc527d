"""Runs a test file once more with Triton's interpreter on, so that the kernels answer in place of the references.

Triton decides when it is imported: that takes a process of its own. One serves all files of a run and forks for each,
since its imports take longer than many a file's tests.
"""

import atexit
import functools
import gc
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tercet.triton_kernels as kernels
from tercet.triton_kernels.dispatch import INTERPRETED

_SECONDS = 280
_IMPORTED_ANYWAY = ("hypothesis", "null_daemon", "tokenizer_fixtures", "torch.distributed.tensor")
"""By pytest when it ends, by conftest.py, and by PyTorch's first comparison."""


def rerun_interpreted(file: str, marks: str = "not gpu and not long") -> None:
    """Run the tests of `file` under TRITON_INTERPRET=1 in a process of their own; a failure shows their output.

    The `long` ones are run by test_long_interpreted.py.
    """
    if INTERPRETED:
        return
    server = _server()
    with tempfile.NamedTemporaryFile("r") as output:
        assert server.stdin is not None
        assert server.stdout is not None
        print(file, output.name, marks, file=server.stdin, flush=True)
        code = server.stdout.readline().strip()
        text = output.read()
    assert code == "0", f"ended with {code or 'the server'}\n{text[-8000:]}"


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    """For each line that names a file of tests, one for their output, and their marks, a line with the exit code."""
    import pytest

    assert INTERPRETED  # and with that torch and Triton are imported
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pytest.main(["--version"])  # imports what pytest is made of
    of_kernels = [f"{kernels.__name__}.{found.name}" for found in pkgutil.iter_modules(kernels.__path__)]
    for name in (*_IMPORTED_ANYWAY, *of_kernels):
        importlib.import_module(name)
    gc.freeze()  # or each child goes through it all when it collects
    for line in sys.stdin:
        file, output, marks = line.strip().split(" ", 2)
        if not (child := os.fork()):
            written = os.open(output, os.O_WRONLY)
            os.dup2(written, 1)
            os.dup2(written, 2)
            code = pytest.main(["-x", "-q", "-m", marks, "-p", "no:cacheprovider", file])
            sys.stdout.flush()
            os._exit(code)
        print(_wait(child), file=answers, flush=True)


def _wait(child: int) -> int:
    """The exit code, at last minus a signal's number."""
    until = time.monotonic() + _SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
