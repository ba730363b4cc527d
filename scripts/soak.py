"""A long run that must leave nothing behind: `python scripts/soak.py --model MODEL --requests 20000 …`.

Requests of random lengths, some with stop strings, some cancelled at any moment, on as few pages as they need. Each
must end exactly once; afterwards every page is free, and no process of the engine has grown in memory or open files.
Prints a report; the exit code is 1 when something is wrong.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from engine_flags import add_engine_flags, engine_config
from soak_load import Load, Mix
from tercet.engine.engine_process import EngineProcess

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLES = 20
_ROOM = 1.05, 24 * 2**20
"""What a flat memory may scatter by: a share, and bytes."""
_REST_S = 10.0


@dataclass(frozen=True)
class Footprint:
    """One process at one time."""

    resident: int
    num_files: int


def footprints(supervisor: int) -> dict[str, Footprint]:
    """Of every process of an engine, by its module; the worker's rank is not told apart."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    prints = {}
    for pid in (str(supervisor), *children):
        module = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2].decode().rpartition(".")[2]
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        prints[f"{module} {pid}"] = Footprint(resident, len(os.listdir(f"/proc/{pid}/fd")))
    return prints


def growth(samples: list[dict[str, Footprint]]) -> list[str]:
    """What grew: the last quarter of the samples against the second, the first being warm-up."""
    quarter = len(samples) // 4
    before, after = samples[quarter : 2 * quarter], samples[-quarter:]
    grown = []
    if {*samples[0]} != {*samples[-1]}:
        grown.append(f"the processes were {sorted(samples[0])} and are {sorted(samples[-1])}")
        return grown
    for name in samples[0]:
        first, last = (max(sample[name].resident for sample in part) for part in (before, after))
        if last > first * _ROOM[0] + _ROOM[1]:
            grown.append(f"{name}: memory grew from {first >> 20} to {last >> 20} MiB")
        first, last = (max(sample[name].num_files for sample in part) for part in (before, after))
        if last > first:
            grown.append(f"{name}: open files grew from {first} to {last}")
    return grown


async def soak(engine: EngineProcess, arguments: argparse.Namespace) -> tuple[Load, list[dict[str, Footprint]], str]:
    """Load and samples, and what is wrong with the gauges at the end, if anything."""
    mix = Mix(
        vocab_size=engine.limits.vocab_size,
        longest_prompt=arguments.longest_prompt,
        longest_output=arguments.longest_output,
    )
    load = Load(engine.address, mix, arguments.load_seed)
    load.open()
    try:
        samples = []
        for part in range(_SAMPLES):
            share = arguments.requests * (part + 1) // _SAMPLES - arguments.requests * part // _SAMPLES
            await load.run(share, arguments.concurrency)
            samples.append(footprints(engine.process.pid))
            print(f"{load.ended} ended, {load.reasons}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + _REST_S
        while True:
            info = await load.ask_info()
            if not (info.num_running or info.num_waiting) and info.num_free_pages == info.num_pages - 1:
                return load, samples, ""
            if time.monotonic() > deadline:
                return load, samples, f"not at rest after the last request: {info}"
            await asyncio.sleep(0.1)
    finally:
        load.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, .gguf file, hub id, or `demo`")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=64, help="requests in the engine at a time")
    parser.add_argument("--longest-prompt", type=int, default=100, metavar="TOKENS")
    parser.add_argument("--longest-output", type=int, default=40, metavar="TOKENS")
    parser.add_argument("--load-seed", type=int, default=0, help="the same requests again")
    add_engine_flags(parser)
    arguments = parser.parse_args()
    if arguments.requests < _SAMPLES:
        parser.error(f"--requests {arguments.requests}; want at least {_SAMPLES}")
    try:
        config = engine_config(arguments.model, arguments)
    except ValueError as error:
        parser.error(str(error))
    started = time.monotonic()
    with EngineProcess(config) as engine:
        load, samples, unrest = asyncio.run(soak(engine, arguments))
    faults = [*load.violations, *growth(samples), *([unrest] if unrest else [])]
    report = {
        "requests": load.ended,
        "seconds": round(time.monotonic() - started, 1),
        "reasons": load.reasons,
        "tokens": load.num_tokens,
        "cached_tokens": load.num_cached,
        "preemptions": load.num_preemptions,
        "resident_mib": {name: [sample[name].resident >> 20 for sample in samples] for name in samples[0]},
        "open_files": {name: [sample[name].num_files for sample in samples] for name in samples[0]},
        "faults": faults[:50],
        "num_faults": len(faults),
    }
    print(json.dumps(report, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
