"""The engine as a measurement of itself: everything real but the worker, which answers each plan at once.

What it gives is the ceiling that processes, messages and Python set on this machine, whatever the card.
"""

import argparse
import itertools
import random
import statistics
import time
from typing import Any

import anyio
import msgspec

from planner_bench import time_planner
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.engine.process_load import read_loads
from tercet.ipc.client import Client
from tercet.ipc.messages import ChatMessage, SamplingParams

_PROMPT = list(range(100, 132))
_WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they"
_TURNS = (2, 8, 20, 38)
"""Messages of the chats whose next turn is timed: some 400 to 7,000 tokens."""


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="whose tokenizer turns ids into text")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--run-ahead", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1])
    parser.add_argument("--lease", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=120_000, help="tokens per measurement, over all requests")


def run_host(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination, one engine each."""
    rows = []
    print(
        f"{'requests':>8} {'repl.':>5} {'ahead':>5} {'lease':>5} {'text':>5} {'steps/s':>9} {'tokens/s':>9}"
        "  CPU us/step by process"
    )
    for replicas, run_ahead, lease in itertools.product(arguments.replicas, arguments.run_ahead, arguments.lease):
        config = EngineConfig(
            model=arguments.model,
            load_format="null",
            data_parallel_size=replicas,
            run_ahead=run_ahead,
            max_lease=lease,
            enable_prefix_caching=False,
        )
        setting = {"replicas": replicas, "run_ahead": run_ahead, "lease": lease}
        shown = f"{replicas:5} {run_ahead:5} {lease:5}"
        with EngineProcess(config) as engine:
            for requests, streamed in itertools.product(arguments.requests, (True, False)):
                tokens = max(min(arguments.tokens // requests, 8000), 16)
                row = anyio.run(_measure, engine, requests, tokens, streamed)
                rows.append({"requests": requests, **setting, "streamed": streamed, **row})
                shares = " ".join(f"{name}={us:.0f}" for name, us in row["cpu_us_per_step"].items())
                print(
                    f"{requests:8} {shown} {'yes' if streamed else 'no':>5} {row['steps_per_s']:9.0f} "
                    f"{row['tokens_per_s']:9.0f}  {shares}",
                    flush=True,
                )
            latency = anyio.run(_first_token_latency, engine)
            rows.append({**setting, "first_token_ms": latency})
            print(f"         {shown} first token after {latency['p50']:.2f} ms (p99 {latency['p99']:.2f})")
            for turns in _TURNS:
                turn = anyio.run(_turn_latency, engine, turns)
                rows.append({**setting, "turns": turns, **turn})
                print(
                    f"         {shown} of a chat's next turn, {turn['ids']} ids, after "
                    f"{turn['next_ms']:.2f} ms; of its first {turn['first_ms']:.2f}"
                )
    return rows


def run_planner() -> list[dict[str, Any]]:
    """The scheduler's core alone."""
    rows = [{"requests": requests, **time_planner(requests)} for requests in (1, 64, 256)]
    for row in rows:
        print(
            " ".join(
                f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
            )
        )
    return rows


async def _measure(engine: EngineProcess, requests: int, tokens: int, streamed: bool) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    async def consume(client: Client) -> None:
        if streamed:
            async for _ in client.stream(_PROMPT, params):
                pass
        else:
            await client.generate(_PROMPT, params)

    async with Client(engine.address) as client:
        await client.generate(_PROMPT, msgspec.structs.replace(params, max_tokens=16))
        before, started = cpu_seconds(engine), time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(requests):
                tasks.start_soon(consume, client)
        seconds = time.perf_counter() - started
        after = cpu_seconds(engine)
    return {
        "steps_per_s": tokens / seconds,
        "tokens_per_s": requests * tokens / seconds,
        "cpu_us_per_step": {name: 1e6 * (after[name] - before[name]) / tokens for name in after},
    }


async def _first_token_latency(engine: EngineProcess, rounds: int = 200) -> dict[str, float]:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    times = []
    async with Client(engine.address) as client:
        for _ in range(rounds):
            started = time.perf_counter()
            await client.generate(_PROMPT, params)
            times.append(1e3 * (time.perf_counter() - started))
    cuts = statistics.quantiles(times, n=100)
    return {"p50": cuts[49], "p99": cuts[98]}


async def _turn_latency(engine: EngineProcess, turns: int, rounds: int = 20) -> dict[str, float]:
    """A chat of so many messages before it is asked something new, the first time and the median of the others."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    draw = random.Random(turns)

    def message(role: str, words: int) -> ChatMessage:
        return ChatMessage(role, " ".join(draw.choices(_WORDS.split(), k=words)))

    chat = [message(("user", "assistant")[turn % 2], 180) for turn in range(turns)]
    times = []
    async with Client(engine.address) as client:
        for _ in range(rounds):
            asked = [*chat, message("user", 20)]
            started = time.perf_counter()
            answer = await client.generate(asked, params)
            times.append(1e3 * (time.perf_counter() - started))
    return {"ids": answer.usage.num_prompt_tokens, "first_ms": times[0], "next_ms": statistics.median(times[1:])}


def cpu_seconds(engine: EngineProcess) -> dict[str, float]:
    """CPU seconds so far of each process of the engine but its supervisor, and of this one, which is the client."""
    _, *loads = read_loads(engine.process.pid)
    return {"client": time.process_time(), **{load.name: load.cpu_seconds for load in loads}}
