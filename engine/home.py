"""A home for a user who has none, or none that can be written to: libraries keep there what they fetch and compile.

It knows no library but Triton, by its variables: that one asks nobody before it writes.
"""

import os
import stat
import tempfile
from pathlib import Path

from tercet.engine.errors import StartupFailed
from tercet.engine.log_line import log_line


def have_home(*, compiles: bool) -> None:
    """For this process and those that it starts. `compiles`: Triton will."""
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        os.environ["HOME"] = str(_own_folder())
        log_line(f"tercet: HOME is not set, and user {os.geteuid()} has no entry; {os.environ['HOME']} takes its place")
    elif compiles and not (os.environ.keys() & {"TRITON_CACHE_DIR", "TRITON_HOME"} or _can_have(home / ".triton")):
        os.environ["TRITON_HOME"] = str(_own_folder())
        log_line(f"tercet: {home} cannot be written to; kernels are kept in {os.environ['TRITON_HOME']}")


def cache_folder() -> Path:
    """For what this engine keeps from one start to the next and could make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tercet"


def can_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def is_ours_alone(folder: Path) -> bool:
    """It is made where it is not there. Others may write beside it, and code is run from there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _can_have(folder: Path) -> bool:
    """What is there counts, written to or not: it may hold all that is needed."""
    return os.path.exists(folder) or can_write(folder.parent)


def _own_folder() -> Path:
    """The same at every start."""
    folder = Path(tempfile.gettempdir()) / f"tercet-home-{os.geteuid()}"
    try:
        alone = is_ours_alone(folder)
    except OSError as error:
        raise StartupFailed(f"there is no home, and {folder} cannot take its place: {error.strerror}") from None
    if not alone:
        raise StartupFailed(f"there is no home, and {folder} is not this user's alone; want HOME to name a folder")
    return folder
