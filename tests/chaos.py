"""Faults at random times against a live engine under traffic, and what must hold after each; `make chaos` runs many.

Every request ends exactly once, and says to the character what an undisturbed engine says; when traffic stops, every
page is free and nothing but the engine's own processes is there; when the engine ends, nothing is.
"""

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import anyio
import msgspec
import psutil

from checkpoints import checkpoint, random_prompts
from engine_children import children
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.ipc.client import Client, ClientError, Generation
from tercet.ipc.messages import SamplingParams
from whole_engine import bytes_of_pages, wait_until_empty

FAMILY = "qwen3"
HEARTBEAT = 1.5
NUM_CASES = 12


@dataclass
class Record:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    cancelled: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from a fault until a request that was asked after it has ended."""

    def report(self) -> str:
        times = sorted(self.recoveries) or [0.0]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.faults.total()} faults ({kinds}); {self.finished} requests finished with {self.tokens} tokens, "
            f"{self.cancelled} cancelled; lost or different: {len(self.wrong)}; seconds until a request asked after "
            f"the fault had ended: median {times[len(times) // 2]:.1f}, longest {times[-1]:.1f}"
        )


@contextmanager
def engine(num_ranks: int) -> Iterator[EngineProcess]:
    """Small enough a cache that requests are preempted, too."""
    config = EngineConfig(
        model=str(checkpoint(FAMILY)),
        device="cpu",
        tensor_parallel_size=num_ranks,
        page_size=16,
        kv_cache_memory=bytes_of_pages(FAMILY, 60) // num_ranks,
        max_num_seqs=8,
        heartbeat_timeout=HEARTBEAT,
        max_restarts=10**6,
        restart_window=0.1,
    )
    with EngineProcess(config) as process:
        yield process


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    params: SamplingParams


def cases(seed: int) -> list[Case]:
    """Greedy and sampled, short and long, some with a stop string."""
    draw = random.Random(seed)
    return [
        Case(
            prompt,
            SamplingParams(
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(2**62),
                max_tokens=draw.choice([5, 60, 200]),
                stop=draw.choice([(), (), "ab", "e"]),
                ignore_eos=True,
            ),
        )
        for prompt in random_prompts(NUM_CASES, 3, 90, seed=seed)
    ]


class Traffic:
    """Several clients that ask all the time and compare what they get."""

    def __init__(self, address: str, wanted: list[tuple[Case, Generation]], record: Record, seed: int) -> None:
        self._address = address
        self._wanted = wanted
        self._record = record
        self._seed = seed
        self._asked = 0
        self._finished: list[int] = []
        self.stopping = False

    async def run(self, num_clients: int = 3, num_streams: int = 2) -> None:
        async with anyio.create_task_group() as tasks:
            for client in range(num_clients):
                tasks.start_soon(self._be_client, client, num_streams)

    async def one_more(self) -> None:
        """Wait until a request that is asked from now on has ended."""
        now = self._asked
        with anyio.fail_after(60):
            while not any(number > now for number in self._finished):
                await anyio.sleep(0.02)

    async def _be_client(self, index: int, num_streams: int) -> None:
        async with Client(self._address) as client, anyio.create_task_group() as tasks:
            for stream in range(num_streams):
                tasks.start_soon(self._ask, client, random.Random(f"{self._seed} {index} {stream}"))

    async def _ask(self, client: Client, draw: random.Random) -> None:
        while not self.stopping:
            case, wanted = draw.choice(self._wanted)
            self._asked += 1
            number = self._asked
            try:
                if draw.random() < 0.1:
                    await self._ask_and_leave(client, case, wanted, draw.randrange(1, 5))
                    continue
                got = await client.generate(case.prompt, case.params)
            except ClientError as error:
                self._record.wrong.append(f"{case} ended with {error!r}")
                continue
            self._record.finished += 1
            self._record.tokens += len(got.token_ids)
            self._finished.append(number)
            if msgspec.structs.replace(got, usage=wanted.usage) != wanted:
                self._record.wrong.append(f"{case}: got {got}, wanted {wanted}")

    async def _ask_and_leave(self, client: Client, case: Case, wanted: Generation, num_pieces: int) -> None:
        text = ""
        async for piece in client.stream(case.prompt, case.params):
            text += piece.text
            num_pieces -= 1
            if not num_pieces:
                break
        self._record.cancelled += 1
        if not wanted.text.startswith(text):
            self._record.wrong.append(f"{case}: {text!r} is not how {wanted.text!r} begins")


async def strike(process: EngineProcess, num_ranks: int, record: Record, draw: random.Random) -> None:
    """One fault."""
    name = draw.choice(["tokenizer", "scheduler", "worker", "worker", "supervisor"])
    kinds = ["is killed", "is killed", "hangs", "stops and goes on"]
    kind = "stops and goes on" if name == "supervisor" else draw.choice(kinds)
    supervisor = psutil.Process(process.process.pid)
    found = [supervisor] if name == "supervisor" else children(supervisor.pid, name)
    if not found:  # it is just being replaced
        return
    target = draw.choice(found)
    record.faults[f"{name} {kind}"] += 1
    print(f"{time.strftime('%X')} {name} of an engine of {num_ranks} {kind}", flush=True)
    with suppress(psutil.NoSuchProcess):  # it died of something else meanwhile
        target.send_signal(signal.SIGKILL if kind == "is killed" else signal.SIGSTOP)
        if kind == "stops and goes on":
            await anyio.sleep(draw.uniform(0.1, 2 * HEARTBEAT))
            target.send_signal(signal.SIGCONT)


async def episode(process: EngineProcess, num_ranks: int, num_faults: int, record: Record, seed: int) -> None:
    """Traffic, faults, and rest."""
    draw = random.Random(seed)
    async with Client(process.address) as client:
        wanted = [(case, await client.generate(case.prompt, case.params)) for case in cases(seed)]
    num_files = psutil.Process(process.process.pid).num_fds()
    traffic = Traffic(process.address, wanted, record, seed)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(traffic.run)
        for _ in range(num_faults):
            await anyio.sleep(draw.uniform(0.0, 0.7))
            began = time.monotonic()
            await strike(process, num_ranks, record, draw)
            await traffic.one_more()
            record.recoveries.append(time.monotonic() - began)
        traffic.stopping = True
    await anyio.to_thread.run_sync(wait_until_empty, process.address)
    counts = [len(children(process.process.pid, name)) for name in ("tokenizer", "scheduler", "worker")]
    assert counts == [1, 1, num_ranks], counts
    assert len(psutil.Process(process.process.pid).children(recursive=True)) == 2 + num_ranks
    assert psutil.Process(process.process.pid).num_fds() == num_files, "the supervisor has files of the dead open"


def run_episode(num_ranks: int, num_faults: int, record: Record, seed: int) -> None:
    """A whole engine's life, at the end of which its supervisor is killed."""
    with engine(num_ranks) as process:
        anyio.run(episode, process, num_ranks, num_faults, record, seed)
        family = psutil.Process(process.process.pid).children(recursive=True)
        process.process.kill()
        record.faults["supervisor is killed"] += 1
        _, alive = psutil.wait_procs(family, 10)
        assert not alive, f"{alive} outlived their supervisor"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    record, number = Record(), 0
    while record.faults.total() < arguments.faults and not record.wrong:
        seed = arguments.seed + number
        num_ranks = 2 if number % 3 == 2 else 1
        number += 1
        print(f"episode {number}: seed {seed}, {num_ranks} ranks", flush=True)
        run_episode(num_ranks, 20, record, seed)
        print(record.report(), flush=True)
    for wrong in record.wrong:
        print(wrong)
    return bool(record.wrong)


if __name__ == "__main__":
    sys.exit(main())
