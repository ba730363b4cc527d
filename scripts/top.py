"""Watch a running engine in the terminal: `python scripts/top.py http://127.0.0.1:8000` (or ipc://…, tcp://…).

Fed by the HTTP door's /metrics, or by the engine itself through its socket, which knows less. Ctrl-C leaves; `--once`
prints one reading, which needs two samples for its rates.
"""

import asyncio
import http.client
import itertools
import math
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress

from program_parser import ProgramParser
from tercet.engine.standard_files import leave_standard_output
from tercet.ipc.answers import EngineInfo, Gauges
from tercet.ipc.client import Client, ClientError

Sample = dict[str, float]
_LINE = re.compile(r"tercet:(\w+)\{([^}]*)\} (\S+)")
_BAR_WIDTH = 30


def read_http(url: str, api_key: str | None) -> Sample:
    """The numbers at /metrics; of histograms their sums and counts. A process has its own, under `number process`, and
    so has each of several replicas."""
    request = urllib.request.Request(url.rstrip("/") + "/metrics")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # a URL that the user has given
            text = answer.read().decode()
    except http.client.HTTPException as error:
        raise ValueError(f"what came is no whole answer of HTTP: {error!r}") from None
    sample: Sample = {}
    of_replicas: dict[str, list[float]] = {}
    for match in _LINE.finditer(text):
        process, replica = re.match(r'process="([^"]*)"$', match[2]), re.search(r'engine="\d+"$', match[2])
        if replica:
            of_replicas.setdefault(match[1], []).append(float(match[3]))
        elif "le=" not in match[2]:
            sample[f"{match[1]} {process[1]}" if process else match[1]] = float(match[3])
    return {**together(of_replicas), **sample}


def together(of_replicas: dict[str, list[float]]) -> Sample:
    """What they are together, and, of several, each one's."""
    sample: Sample = {}
    for name, values in of_replicas.items():
        sample[name] = sum(values) / (len(values) if name == "kv_cache_usage_perc" else 1)
        if len(values) > 1:
            sample |= {f"{name} replica {number}": value for number, value in enumerate(values)}
    return sample


def read_socket(address: str, listen_key: str | None) -> Sample:
    """The engine's gauges, under the names that /metrics gives them."""

    async def ask() -> Sample:
        async with Client(address, key=listen_key, connect_timeout=5) as client:
            info = await client.info()
        replicas = [gauges(one) for one in info.replicas or (info,)]
        return together({name: [one[name] for one in replicas] for name in replicas[0]})

    return asyncio.run(ask())


def gauges(of: EngineInfo | Gauges) -> Sample:
    return {
        "num_requests_running": of.num_running,
        "num_requests_waiting": of.num_waiting,
        "kv_cache_usage_perc": 1 - of.num_free_pages / max(1, of.num_pages - 1),
        "num_preemptions_total": of.num_preemptions,
        "prefix_cache_queries_total": of.num_prefix_queries,
        "prefix_cache_hits_total": of.num_prefix_hits - of.num_host_hits,
        "external_prefix_cache_hits_total": of.num_host_hits,
        "steps_total": of.num_steps,
        "spec_decode_num_draft_tokens_total": of.num_guesses,
        "spec_decode_num_accepted_tokens_total": of.num_right_guesses,
    }


def picture(now: Sample, before: Sample, seconds: float) -> Iterator[str]:
    """What a person wants to see, a line each; what is not known is left out."""
    if "num_requests_running" not in now:
        yield "the engine does not answer"
        return
    yield f"requests      {now['num_requests_running']:.0f} running, {now['num_requests_waiting']:.0f} waiting"
    used = now["kv_cache_usage_perc"]
    yield f"KV cache      {'█' * round(used * _BAR_WIDTH):·<{_BAR_WIDTH}} {used:.1%}"
    rates = [("generated", "generation_tokens_total", "tok/s"), ("prompts", "prompt_tokens_total", "tok/s")]
    for label, name, unit in [*rates, ("steps", "steps_total", "/s")]:
        if name in now and now[name] >= before.get(name, math.inf):  # a process that was replaced counts anew
            yield f"{label:<13} {(now[name] - before[name]) / seconds:.0f} {unit}"
    if asked := now["prefix_cache_queries_total"]:
        yield f"prefix hits   {now['prefix_cache_hits_total'] / asked:.0%} of {asked:.0f} prompt tokens"
        if came := now.get("external_prefix_cache_hits_total"):
            yield f"host hits     {came / asked:.0%} of them"
    if guessed := now.get("spec_decode_num_draft_tokens_total"):
        yield f"guesses right {now['spec_decode_num_accepted_tokens_total'] / guessed:.0%} of {guessed:.0f}"
    if interrupted := now["num_preemptions_total"]:
        yield f"preemptions   {interrupted:.0f}"
    times = [("first token", "time_to_first_token_seconds"), ("next token", "inter_token_latency_seconds")]
    for label, name in [*times, ("in the queue", "request_queue_time_seconds")]:
        if (count := now.get(f"{name}_count", 0) - before.get(f"{name}_count", math.inf)) > 0:
            yield f"{label:<13} {1e3 * (now[f'{name}_sum'] - before[f'{name}_sum']) / count:.1f} ms on average"
    for replica in itertools.takewhile(lambda one: f"num_requests_running replica {one}" in now, itertools.count()):
        running, waiting, used = (
            now[f"{name} replica {replica}"]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )
        yield f"{f'replica {replica}':<13} {running:.0f} running, {waiting:.0f} waiting, {used:.1%} of the KV cache"
    for key, used in now.items():
        name, _, process = key.partition(" ")
        if name == "process_cpu_seconds_total":
            share = max(0.0, used - before.get(key, used)) / seconds  # one that was replaced begins anew
            memory = now[f"process_resident_memory_bytes {process}"] / 2**20
            yield f"{process:<13} {share:4.0%} of a core, {memory:,.0f} MiB"


def main() -> int:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("engine", help="http://HOST:PORT, ipc://PATH or tcp://HOST:PORT")
    parser.add_argument("--api-key", help="for the HTTP door; default: TERCET_API_KEY of the environment")
    parser.add_argument("--listen-key", help="for the socket; default: TERCET_LISTEN_KEY of the environment")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between readings")
    parser.add_argument("--once", action="store_true", help="print one reading and end")
    arguments = parser.parse_args()
    key = arguments.api_key or os.environ.get("TERCET_API_KEY")
    listen_key = arguments.listen_key or os.environ.get("TERCET_LISTEN_KEY") or None
    read: Callable[[], Sample]
    if arguments.engine.startswith(("http://", "https://")):
        read = lambda: read_http(arguments.engine, key)  # noqa: E731
    elif arguments.engine.startswith(("ipc://", "tcp://")):
        read = lambda: read_socket(arguments.engine, listen_key)  # noqa: E731
    else:
        parser.error(f"engine is {arguments.engine!r}; want http://HOST:PORT, ipc://PATH or tcp://HOST:PORT")
    if not arguments.interval > 0:
        parser.error(f"--interval is {arguments.interval}; want more than 0")
    with suppress(KeyboardInterrupt):
        return watch(arguments.engine, read, arguments.interval, arguments.once)
    return 0


def watch(engine: str, read: Callable[[], Sample], interval: float, once: bool) -> int:
    """Until interrupted, or the engine is gone, or who reads the pictures."""
    try:
        before, at = read(), time.monotonic()
        while True:
            time.sleep(interval)
            now, then = read(), time.monotonic()
            lines = [engine, *picture(now, before, then - at)]
            before, at = now, then
            if not show(("" if once else "\x1b[H\x1b[2J") + "\n".join(lines)) or once:
                return 0
    except (OSError, ClientError, ValueError) as error:
        print(f"tercet: {engine}: {error}", file=sys.stderr)
        return 1


def show(text: str) -> bool:
    """Whether anybody reads it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_standard_output()
        return False
    except OSError as error:
        raise OSError(error.errno, f"nothing can be shown: {error.strerror}") from None
    return True


if __name__ == "__main__":
    sys.exit(main())
