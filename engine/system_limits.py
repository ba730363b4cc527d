"""How many files, processes and threads the system lets us have: raised where it may be, named where it is too few."""

import contextlib
import fcntl
import os
import resource

_MANY_FILES = 2**14
"""Eight bytes each in the table."""
_NO_FILES = "Too many open files"
_NO_PROCESS = ("Resource temporarily unavailable", "can't start new thread")
"""As the C library, ZeroMQ and Python say it."""


def raise_file_limit() -> None:
    """Each connection is an open file, and ZeroMQ aborts its process where one more is too many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_room_for_files() -> None:
    """Have the kernel's table of this process's open files made large, before there are threads.

    It grows when it is full, at 64 files, 256, 512 and so on, and in a process with threads whoever opens the next one
    stands still until all processors have taken note: 10 to 25 ms.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = (_MANY_FILES if soft == resource.RLIM_INFINITY else min(soft, _MANY_FILES)) - 1
    with contextlib.suppress(OSError), open(os.devnull) as file:  # with no file to spare there is no need either
        os.close(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, last))


def with_advice(said: str) -> str:
    """Why something failed, and which limit is too low if it is for want of files, processes or threads."""
    if _NO_FILES in said:
        most = _in_words(resource.RLIMIT_NOFILE)
        return f"{said}: a process here may have {most} files open, and that is too few (RLIMIT_NOFILE: ulimit -Hn)"
    if any(words in said for words in _NO_PROCESS):
        whose = f"user {os.geteuid()} may have {_in_words(resource.RLIMIT_NPROC)} processes and threads"
        return f"{said}: {whose} (RLIMIT_NPROC: ulimit -u), or its container no more (pids.max), and that is too few"
    return said


def _in_words(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "any number of" if soft == resource.RLIM_INFINITY else str(soft)
