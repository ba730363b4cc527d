"""How much memory of the host is free: what an engine is about to take may not be more."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tercet.engine.config import EngineConfig
from tercet.engine.control_groups import GROUPS, MOUNT, control_groups
from tercet.engine.errors import StartupFailed

_MEMINFO = Path("/proc/meminfo")
_SHARE = 0.9
"""Of what is free: processes want some, too."""


def check_host_memory(config: EngineConfig) -> None:
    """Before anything is taken: the system would end whoever it likes to when there is no more."""
    if config.kv_offloading_size is None or config.load_format == "null":
        return
    wanted, free = config.kv_offloading_size * config.data_parallel_size, free_memory()
    if free is not None and wanted > _SHARE * free:
        replicas = f", for each of {config.data_parallel_size} replicas" if config.data_parallel_size > 1 else ""
        each = _SHARE * free / config.data_parallel_size / 2**30
        raise StartupFailed(
            f"--kv-offloading-size is {config.kv_offloading_size / 2**30:.1f} GiB{replicas}, and {free / 2**30:.1f} "
            f"GiB of the host's memory are free; want at most {each:.1f} GiB"
        )


def free_memory(meminfo: Path = _MEMINFO, groups: Path = GROUPS, mount: Path = MOUNT) -> int | None:
    """Bytes, within what a container may have; what holds files that can be read again counts. None: nobody says."""
    free = list(_available(meminfo))
    for folder in control_groups("memory", groups, mount):
        free += _left(folder, "memory.max", "memory.current", "inactive_file")
        free += _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(free, default=None)


def _available(meminfo: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        lines = (line.split() for line in meminfo.read_text().splitlines())
        yield from (1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:")


def _left(folder: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # `max` is no number
        most, used = (int(folder.joinpath(name).read_text()) for name in (limit, usage))
        stat = dict(line.split() for line in folder.joinpath("memory.stat").read_text().splitlines())
        yield max(0, most - used + int(stat.get(cached, 0)))
