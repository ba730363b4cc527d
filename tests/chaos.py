"""Faults at random times against a live engine under traffic, and what must hold after each; `make chaos` runs many.

Every request ends exactly once, and says to the character what an undisturbed engine says; when traffic stops, every
page is free and nothing but the engine's own processes is there; when the engine ends, nothing is.
"""

import argparse
import atexit
import functools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import anyio
import psutil

from adapter_folders import make_adapter
from chaos_changes import GUEST, change_on
from chaos_traffic import ADAPTERS, Record, Traffic, Wanted, cases
from checkpoints import checkpoint
from daemon import free_port
from engine_children import children, is_alive
from repetitive_model import repetitive
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.engine.speculation import SpeculativeConfig
from tercet.ipc.client import Client
from whole_engine import bytes_of_pages, wait_until_empty

FAMILY = "qwen3"
HEARTBEAT = 1.5
KILLED, HANGS, PAUSES = "is killed", "hangs", "stops and goes on"
DECK = [
    *product(["tokenizer", "scheduler", "worker", "http"], [KILLED, HANGS, PAUSES]),
    ("supervisor", PAUSES),
    ("grammar_process", KILLED),
    ("grammar_trial", KILLED),
]
"""Each kind of fault once; kills are dealt more often."""
HELPERS = {"grammar_process": "scheduler", "grammar_trial": "tokenizer"}
"""Processes that others start when they need them, and whose children they are."""
ROLES = ("tokenizer", "scheduler", "worker", "http")


def model_of(tries: bool) -> Path:
    return repetitive() if tries else checkpoint(FAMILY)


@functools.cache
def adapters(model: Path) -> list[Path]:
    """And one more, for who is loaded meanwhile."""
    scratch = Path(tempfile.mkdtemp(prefix="tercet-adapters-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return [make_adapter(scratch / name, model, seed) for seed, name in enumerate((*ADAPTERS, GUEST))]


@functools.cache
def folders(model: Path) -> list[Path]:
    """It, and another with the same weights."""
    scratch = Path(tempfile.mkdtemp(prefix="tercet-weights-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return [model, Path(shutil.copytree(model, scratch / "same"))]


@contextmanager
def engine(num_ranks: int, num_replicas: int, http: str, *, tries: bool, offloads: bool) -> Iterator[EngineProcess]:
    """Small enough a cache that requests are preempted, too. `tries`: tokens ahead, of a model that repeats itself;
    `offloads`: pages have copies in the host's memory."""
    model = model_of(tries)
    config = EngineConfig(
        model=str(model),
        adapter=tuple(f"{name}={folder}" for name, folder in zip(ADAPTERS, adapters(model), strict=False)),
        max_adapters=len(ADAPTERS) + 1,
        max_adapter_rank=20,
        allow_changes=True,
        speculative_config=SpeculativeConfig(num_speculative_tokens=3) if tries else None,
        device="cpu",
        tensor_parallel_size=num_ranks,
        data_parallel_size=num_replicas,
        page_size=16,
        kv_cache_memory=bytes_of_pages(FAMILY, 60) // num_ranks,
        kv_offloading_size=bytes_of_pages(FAMILY, 200) if offloads else None,
        max_num_seqs=8,
        heartbeat_timeout=HEARTBEAT,
        http=http,
        log_requests=False,
        max_restarts=10**6,
        restart_window=0.1,
    )
    with EngineProcess(config) as process:
        yield process


def deal(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Faults without end: all kinds come, in any order, and then all again with some kills more."""
    deck = list(DECK)
    while True:
        draw.shuffle(deck)
        yield from deck
        deck = [*DECK, *((name, KILLED) for name in (*ROLES, "worker"))]


async def strike(
    process: EngineProcess, name: str, kind: str, traffic: Traffic, record: Record, draw: random.Random
) -> None:
    """One fault."""
    supervisor = psutil.Process(process.process.pid)
    match name:
        case "supervisor":
            found = [supervisor]
        case "grammar_process" | "grammar_trial":
            parents = children(supervisor.pid, HELPERS[name])
            found = [one for parent in parents for one in children(parent.pid, name)]
        case _:
            found = children(supervisor.pid, name)
    if not found:  # it is just being replaced
        return
    if name == "http":
        traffic.expect_cuts()
    target = draw.choice(found)
    record.faults[f"{name} {kind}"] += 1
    print(f"{time.strftime('%X')} {target.cmdline()[-1].removeprefix('tercet.engine.')} {kind}", flush=True)
    with suppress(psutil.NoSuchProcess):  # it died of something else meanwhile
        target.send_signal(signal.SIGKILL if kind == KILLED else signal.SIGSTOP)
        if kind == PAUSES:
            await anyio.sleep(draw.uniform(0.1, 2 * HEARTBEAT))
            target.send_signal(signal.SIGCONT)


async def episode(
    process: EngineProcess, http: str, num_ranks: int, num_replicas: int, num_faults: int, record: Record, seed: int
) -> None:
    """Traffic, changes, faults, and rest."""
    model = model_of(tries=seed % 2 == 1)
    draw = random.Random(seed)
    async with Client(process.address) as client:
        wanted = []
        for case in cases(seed):
            embedding = await client.embed(case.prompt, case.embedding)
            wanted.append(Wanted(case, await client.generate(case.prompt, case.params), embedding))
    supervisor = psutil.Process(process.process.pid)
    num_files = supervisor.num_fds()
    traffic = Traffic(process.address, http, wanted, record, seed)
    faults = deal(draw)
    async with anyio.create_task_group() as tasks:
        # Ranks that wait for each other are slow; and everybody has two cores.
        fewer = num_ranks * num_replicas
        tasks.start_soon(traffic.run, 2, 3 - fewer, 4 - fewer)
        tasks.start_soon(change_on, process.address, folders(model), adapters(model)[-1], traffic, record, seed)
        for _ in range(num_faults):
            await anyio.sleep(draw.uniform(0.0, 0.7))
            began = time.monotonic()
            await strike(process, *next(faults), traffic, record, draw)
            await traffic.one_more()
            record.recoveries.append(time.monotonic() - began)
        traffic.stopping = True
    await anyio.to_thread.run_sync(wait_until_empty, process.address)
    counts = [len(children(supervisor.pid, name)) for name in ROLES]
    assert counts == [1, num_replicas, num_replicas * num_ranks, 1], counts
    num_helpers = [
        len(children(parent.pid, name)) for name, role in HELPERS.items() for parent in children(supervisor.pid, role)
    ]
    assert max(num_helpers) <= 1, num_helpers
    # A helper that was killed at rest is taken leave of when the next is needed.
    living = [one for one in supervisor.children(recursive=True) if is_alive(one)]
    assert len(living) == sum(counts) + sum(num_helpers), living
    assert supervisor.num_fds() == num_files, "the supervisor has files of the dead open"
    (door,) = children(supervisor.pid, "http")
    connections = [one for one in door.net_connections("tcp") if one.status != psutil.CONN_LISTEN]
    assert not connections, f"the door keeps {connections}"


def run_episode(num_ranks: int, num_faults: int, record: Record, seed: int, num_replicas: int = 1) -> None:
    """A whole engine's life, at the end of which its supervisor is killed."""
    http = f"127.0.0.1:{free_port()}"
    with engine(num_ranks, num_replicas, http, tries=seed % 2 == 1, offloads=seed % 3 == 0) as process:
        anyio.run(episode, process, http, num_ranks, num_replicas, num_faults, record, seed)
        family = psutil.Process(process.process.pid).children(recursive=True)
        process.process.kill()
        record.faults["supervisor is killed"] += 1
        _, alive = psutil.wait_procs(family, 10)
        assert not alive, f"{alive} outlived their supervisor"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--replicas", type=int, choices=[1, 2], help="default: two in one engine of five")
    arguments = parser.parse_args()
    record, number = Record(), 0
    while record.faults.total() < arguments.faults and not record.wrong:
        seed = arguments.seed + number
        num_replicas = arguments.replicas or (2 if number % 5 == 2 else 1)
        num_ranks = 2 if number % 5 == 4 and num_replicas == 1 else 1
        number += 1
        print(f"episode {number}: seed {seed}, {num_replicas} replicas of {num_ranks} ranks", flush=True)
        run_episode(num_ranks, 20, record, seed, num_replicas)
        print(record.report(), flush=True)
    for wrong in record.wrong:
        print(wrong)
    return bool(record.wrong)


if __name__ == "__main__":
    sys.exit(main())
