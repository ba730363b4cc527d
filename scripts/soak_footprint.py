"""What the processes of an engine hold, sampled while it works, and what of it has grown. Linux only (`/proc`)."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROOM = 1.05, 24 * 2**20
"""What a flat memory may scatter by: a share, and bytes."""
_FEWEST = 8


@dataclass(frozen=True)
class Footprint:
    """One process at one time."""

    resident: int
    num_files: int
    num_sockets: int
    num_threads: int


def footprints(supervisor: int) -> dict[str, Footprint]:
    """Of every process of an engine, by its module and pid; the worker's rank is not told apart."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return {f"{_module(pid)} {pid}": _footprint(Path("/proc", pid)) for pid in (str(supervisor), *children)}


def _module(pid: str) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[words.index(b"-m") + 1].decode().rpartition(".")[2]


def _footprint(process: Path) -> Footprint:
    links = []
    for link in (process / "fd").iterdir():
        try:
            links.append(os.readlink(link))
        except FileNotFoundError:
            continue  # closed since
    return Footprint(
        resident=int((process / "statm").read_text().split()[1]) * _PAGE_BYTES,
        num_files=len(links),
        num_sockets=sum(link.startswith("socket:") for link in links),
        num_threads=len(os.listdir(process / "task")),
    )


class Sampler:
    """Footprints of one engine and the seconds at which they were taken."""

    def __init__(self, supervisor: int, every: float) -> None:
        self._supervisor = supervisor
        self._every = every
        self._began = time.monotonic()
        self.samples: list[dict[str, Footprint]] = []
        self.seconds: list[float] = []

    async def run(self) -> None:
        """Until cancelled; a process that ends while it is looked at ends this."""
        while True:
            self.samples.append(footprints(self._supervisor))
            self.seconds.append(round(time.monotonic() - self._began, 1))
            await asyncio.sleep(self._every)

    def report(self) -> dict[str, object]:
        """Every sample, by what was counted and process."""

        def column(name: str, shift: int = 0) -> dict[str, list[int]]:
            return {
                process: [getattr(sample[process], name) >> shift for sample in self.samples if process in sample]
                for process in self.samples[0]
            }

        return {
            "at_second": self.seconds,
            "resident_mib": column("resident", 20),
            "open_files": column("num_files"),
            "sockets": column("num_sockets"),
            "threads": column("num_threads"),
        }


def growth(samples: list[dict[str, Footprint]], spare_files: int = 0) -> list[str]:
    """What grew: the last quarter of the samples against the second, the first being warm-up.

    `spare_files`: connections that may be open in one sample and not in another.
    """
    if len(samples) < _FEWEST:
        return [f"{len(samples)} samples tell no growth; want {_FEWEST} (--sample-every)"]
    quarter = len(samples) // 4
    before, after = samples[quarter : 2 * quarter], samples[-quarter:]
    grown = []
    if any({*sample} != {*samples[0]} for sample in samples):
        grown.append(f"the processes were {sorted(samples[0])} and are {sorted(samples[-1])}")
        return grown
    for name in samples[0]:
        first, last = (max(sample[name].resident for sample in part) for part in (before, after))
        if last > first * _ROOM[0] + _ROOM[1]:
            grown.append(f"{name}: memory grew from {first >> 20} to {last >> 20} MiB")
        for what, count in (("open files", "num_files"), ("threads", "num_threads")):
            first, last = (max(getattr(sample[name], count) for sample in part) for part in (before, after))
            if last > first + (spare_files if count == "num_files" else 0):
                grown.append(f"{name}: {what} grew from {first} to {last}")
    return grown
