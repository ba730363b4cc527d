"""What each process of an engine takes of its machine, as the kernel tells it. It asks no process, and knows Linux."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessLoad(msgspec.Struct, frozen=True):
    """One process, from its start until now."""

    name: str
    """supervisor, tokenizer, scheduler, http, worker 0, worker 1, …; with several replicas, replica 0 scheduler, …"""
    cpu_seconds: float
    resident_bytes: int


def read_loads(supervisor: int) -> list[ProcessLoad]:
    """Of an engine's processes that are there; none where the kernel does not say."""
    loads = []
    with suppress(OSError):
        loads.append(_read("supervisor", supervisor))
        for name, pid in _children(supervisor):
            with suppress(OSError):  # it has just ended
                loads.append(_read(name, pid))
    return loads


def _children(supervisor: int) -> Iterator[tuple[str, int]]:
    """Each is started with its name as the one argument."""
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        with suppress(OSError):
            _, _, words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().partition("tercet.engine.")
            role, _, name = words.rstrip("\0").partition("\0")
            if role in ("tokenizer", "scheduler", "http", "worker"):
                yield name, int(pid)


def _read(name: str, pid: int) -> ProcessLoad:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessLoad(name, (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE_BYTES)
