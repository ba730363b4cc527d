"""Bytecode where modules come without it and Python is not to write it beside them: it is kept in a folder of ours.

Images of containers are often like that: installed without bytecode, with PYTHONDONTWRITEBYTECODE set or for a user who
may not write there. Then every process compiles the source of all it imports at every start, seconds of it for torch.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

from tercet.engine.home import cache_folder, can_write, is_ours_alone

_PREFIX = "PYTHONPYCACHEPREFIX"


def keep_bytecode(largest: str = "torch") -> None:
    """For the processes that this one starts. `largest`: the package that stands for all of them."""
    if _PREFIX in os.environ or not _is_compiled_each_time(largest):
        return
    folder = cache_folder() / "bytecode"
    with contextlib.suppress(OSError):  # where it cannot be made, all stays as it is
        if is_ours_alone(folder) and can_write(folder):
            os.environ[_PREFIX] = str(folder)
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_compiled_each_time(package: str) -> bool:
    found = importlib.util.find_spec(package)
    if found is None or found.cached is None or os.path.exists(found.cached):
        return False
    beside = Path(found.cached).parent
    beside = beside if beside.exists() else beside.parent
    return sys.dont_write_bytecode or not can_write(beside)
