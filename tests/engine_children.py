"""The processes of an engine, seen from outside."""

import contextlib

import psutil


def children(supervisor: int, name: str) -> list[psutil.Process]:
    """The living children of this kind, oldest first."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(supervisor).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if f"tercet.engine.{name}" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended is no more, though nobody may have asked yet how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
