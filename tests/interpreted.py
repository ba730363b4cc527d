"""Runs a test file once more with Triton's interpreter on, so that the kernels answer in place of the references."""

import os
import subprocess
import sys

from tercet.triton_kernels.dispatch import INTERPRETED


def rerun_interpreted(file: str) -> None:
    """Run the tests of `file` under TRITON_INTERPRET=1 in a process of their own; a failure shows their output."""
    if INTERPRETED:
        return
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider", file]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
