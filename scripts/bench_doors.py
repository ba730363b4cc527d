"""The engine's two doors side by side: the same requests by its own socket and by HTTP, from a process of their own.

A worker that computes nothing paces the steps, so that what differs is the doors and the load generator.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_host import cpu_seconds
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess

_DOORS = ("socket", "http")
_SERVE = Path(__file__).parent / "bench.py"


def add_door_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="whose tokenizer turns ids into text")
    parser.add_argument("--http", default="127.0.0.1:8017", help="where the HTTP door may be meanwhile")
    parser.add_argument("--streams", type=int, default=64, help="at a time, on average")
    parser.add_argument("--step-ms", type=float, default=10.0, help="what a step takes the worker")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--requests", type=int, default=320, help="in each round, by each door")
    parser.add_argument("--rounds", type=int, default=3)


def run_doors(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds by one door and the other in turn; prints each, and how the best compare: other work only slows down."""
    config = EngineConfig(
        model=arguments.model,
        load_format="null",
        null_step_ms=arguments.step_ms,
        http=arguments.http,
        log_requests=False,
        enable_prefix_caching=False,
    )
    rows = []
    print(f"{'door':7}{'tokens/s':>10}{'ttft p50':>10}{'p99':>8}{'itl p50':>9}{'p99':>8}  CPU us/event by process")
    with EngineProcess(config) as engine:
        for number in range(arguments.rounds * 2):
            door = _DOORS[number % 2]
            where = ["--address", engine.address] if door == "socket" else ["--base-url", f"http://{config.http}/v1"]
            rows.append({"door": door, **_round(engine, where, arguments, number // 2)})
            _print(rows[-1])
    for name, figure, best in (("tokens/s", _tokens, max), ("ttft p50", _first, min), ("itl p50", _next, min)):
        socket, http = (best(figure(row) for row in rows if row["door"] == door) for door in _DOORS)
        print(f"{name}: HTTP {http / socket - 1:+.1%}")
    return rows


def _round(engine: EngineProcess, where: list[str], arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    rate = arguments.streams / (arguments.tokens * arguments.step_ms / 1e3)
    before, children = cpu_seconds(engine), os.times()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "report.json"
        load = {
            "rate": rate,
            "requests": arguments.requests,
            "prompt-tokens": 16,
            "output-tokens": arguments.tokens,
            "load-seed": seed,
            "json": file,
        }
        flags = [word for name, value in load.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, str(_SERVE), "serve", *where, *flags], check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(file.read_text())["rows"][0]
    after, children_after = cpu_seconds(engine), os.times()
    del after["client"]  # that is this process
    num_events = report["arrivals"]
    spent = {name: 1e6 * (after[name] - before[name]) / num_events for name in after}
    user = children_after.children_user + children_after.children_system
    spent["load"] = 1e6 * (user - children.children_user - children.children_system) / num_events
    return {**report, "cpu_us_per_event": spent}


def _print(row: dict[str, Any]) -> None:
    shares = " ".join(f"{name}={us:.1f}" for name, us in row["cpu_us_per_event"].items())
    print(
        f"{row['door']:7}{_tokens(row):10.0f}{_first(row):10.2f}{row['ttft_ms']['p99']:8.2f}{_next(row):9.2f}"
        f"{row['itl_ms']['p99']:8.2f}  {shares}" + (f"  {row['failed']} failed" if row["failed"] else ""),
        flush=True,
    )


def _tokens(row: dict[str, Any]) -> float:
    return float(row["output_tokens_per_s"])


def _first(row: dict[str, Any]) -> float:
    return float(row["ttft_ms"]["p50"])


def _next(row: dict[str, Any]) -> float:
    return float(row["itl_ms"]["p50"])
