"""A load test: requests that arrive at random at a given rate, from an engine at a socket or an OpenAI endpoint.

Requests arrive whether or not earlier ones are answered, as people do. The same seed gives the same arrivals, prompts
and lengths, whoever is asked.
"""

import argparse
import asyncio
import contextlib
import gc
import math
import os
import random
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from serve_report import Timeline, summarize, table
from serve_targets import OpenAITarget, SocketTarget, Target
from tercet.engine.system_limits import make_room_for_files
from tercet.ipc.client import Client

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples lie evenly between whole numbers, however many of them there are."""


@dataclass(frozen=True)
class Arrival:
    """One request: when, after the first, and what."""

    at: float
    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths: `N`, `LOW:HIGH` (uniform), or `exp:MEAN` (exponential, at least 1)."""

    text: str

    def __post_init__(self) -> None:
        self.draw(random.Random(0))

    def draw(self, rng: random.Random) -> int:
        if match := re.fullmatch(r"([1-9]\d*)", self.text):
            return int(match[1])
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.text)
        if match and int(match[1]) <= int(match[2]):
            return rng.randint(int(match[1]), int(match[2]))
        if match := re.fullmatch(r"exp:([1-9]\d*)", self.text):
            return max(1, round(rng.expovariate(1 / int(match[1]))))
        raise argparse.ArgumentTypeError(f"got {self.text!r}; want N, LOW:HIGH or exp:MEAN, in tokens")


def arrivals(
    count: int, rate: float, prompts: Lengths, outputs: Lengths, vocabulary: int, seed: int, period: float = 0.0
) -> list[Arrival]:
    """`rate` requests a second on average, the gaps exponential (a Poisson process); infinite: all at once.

    `period`: of the server's steps, in seconds. Each arrival is moved within it, so that the few of one run see every
    phase of a step as often as many would.
    """
    rng = random.Random(seed)
    at, plan = 0.0, []
    for index in range(count):
        prompt = [rng.randrange(vocabulary // 10, vocabulary) for _ in range(prompts.draw(rng))]
        moved = period * (at // period + index * _GOLDEN % 1) if period else at
        plan.append(Arrival(moved, prompt, outputs.draw(rng)))
        at += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return sorted(plan, key=lambda arrival: arrival.at)


async def offer(target: Target, plan: list[Arrival]) -> list[Timeline]:
    """Send each request at its time; wait for all."""
    started = time.monotonic()

    async def one(arrival: Arrival) -> Timeline:
        await asyncio.sleep(started + arrival.at - time.monotonic())
        timeline = Timeline(time.monotonic(), len(arrival.prompt))
        await target.ask(arrival.prompt, arrival.num_tokens, timeline)
        return timeline

    return list(await asyncio.gather(*(one(arrival) for arrival in plan)))


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--address", help="an engine's socket, as its `ready` line says")
    where.add_argument("--base-url", help="an OpenAI-compatible endpoint: http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--listen-key", default=os.environ.get("TERCET_LISTEN_KEY") or None, help="of the socket, if it has one"
    )
    parser.add_argument("--model", help="its name at the endpoint; default: the first that it lists")
    parser.add_argument("--api-key", help="for the endpoint")
    parser.add_argument("--rate", type=_rate, default=math.inf, help="requests a second; default: all at once")
    parser.add_argument("--requests", type=int, default=200, help="in all")
    parser.add_argument("--warm-up", type=int, default=0, help="of these, so many whose first token does not count")
    parser.add_argument(
        "--period-ms", type=float, default=0.0, help="spread arrivals evenly over steps that take so long"
    )
    parser.add_argument("--prompt-tokens", type=Lengths, default=Lengths("512"), help="N, LOW:HIGH or exp:MEAN")
    parser.add_argument("--output-tokens", type=Lengths, default=Lengths("128"), help="N, LOW:HIGH or exp:MEAN")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="prompts are random ids below this")
    parser.add_argument("--temperature", type=float, default=0.6, help="of each request")
    parser.add_argument("--load-seed", type=int, default=0, help="the same arrivals, prompts and lengths again")
    parser.add_argument("--slo-ttft-ms", type=float, help="a good request's first token comes within this")
    parser.add_argument("--slo-itl-ms", type=float, help="and its mean time for each further token is within this")


def run_serve(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask, print, and return the figures. A first request of its own warms up and does not count."""
    plan = arrivals(
        arguments.requests,
        arguments.rate,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.vocabulary,
        arguments.load_seed,
        arguments.period_ms / 1e3,
    )

    if not 0 <= arguments.warm_up < arguments.requests:
        raise ValueError(f"--warm-up {arguments.warm_up}; want less than --requests {arguments.requests}")
    cpu_seconds = 0.0

    async def run() -> list[Timeline]:
        nonlocal cpu_seconds
        async with _target(arguments) as target:
            warm_up = Timeline(time.monotonic(), 0)
            await target.ask(plan[0].prompt, 2, warm_up)
            if warm_up.error is not None:
                raise ValueError(f"the first request failed: {warm_up.error}")
            gc.freeze()  # what stands while we measure need not be looked through
            before = time.process_time()
            timelines = await offer(target, plan)
            cpu_seconds = time.process_time() - before
            return timelines

    make_room_for_files()  # else whoever connects as the 256th would hold up all others
    timelines = asyncio.run(run())
    report = summarize(timelines, arguments.slo_ttft_ms, arguments.slo_itl_ms, arguments.warm_up)
    report["load_cpu_s"] = cpu_seconds
    print("\n".join(table(report)), flush=True)
    return [report]


@contextlib.asynccontextmanager
async def _target(arguments: argparse.Namespace) -> AsyncIterator[Target]:
    if arguments.address is not None:
        async with Client(arguments.address, key=arguments.listen_key) as client:
            yield SocketTarget(client, arguments.temperature)
        return
    endpoint = OpenAITarget(arguments.base_url, arguments.model or "", arguments.temperature, arguments.api_key)
    if arguments.model is None:
        await endpoint.first_model()
    yield endpoint


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"got {text}; want more than 0, or inf for all at once")
    return rate
