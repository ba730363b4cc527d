"""The processes of an engine, found from outside."""

import contextlib

import psutil


def children(supervisor: int, name: str) -> list[psutil.Process]:
    """The living children of this kind, oldest first."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(supervisor).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline()[-1:] == [f"tercet.engine.{name}"] and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found
