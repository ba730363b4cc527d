"""Fills Triton's cache with the kernels of candidates for a Hopper card, in as many processes as there are cores.

Knows shares of the work; what is compiled, the tuners know.
"""

import os
import subprocess
from collections.abc import Callable, Iterable
from itertools import islice

from tercet.triton_kernels.compile_only import compiling_for

Compilation = tuple[str, Callable[[], object]]
"""What is compiled, in words, and what launches it."""


def compile_share(compilations: Iterable[Compilation], share: str) -> None:
    """Compile one process's part: `share` is "its number/how many"."""
    number, shares = map(int, share.split("/"))
    for name, launch in islice(compilations, number, None, shares):
        try:
            with compiling_for(90):
                launch()
        except Exception as error:  # noqa: BLE001  a candidate that does not compile is a result, not a failure
            print("compile", name, str(error)[:200], flush=True)


def compile_in_processes(command: list[str]) -> None:
    """Run a command that compiles its `--share`, for all shares at a time, to the end."""
    shares = os.cpu_count() or 1
    compilers = [subprocess.Popen([*command, "--share", f"{number}/{shares}"]) for number in range(shares)]
    for compiler in compilers:
        compiler.wait()
