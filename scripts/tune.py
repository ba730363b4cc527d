"""Measure every candidate of every product on this GPU, and write the table that the engine picks from.

    python scripts/tune.py measure --rows 1,8,64 --log tune.jsonl --seconds 500
    python scripts/tune.py select --log tune.jsonl --table triton_kernels/tuned/NVIDIA_H200.json

Resumable: what the log holds is not measured again. Kernels compile in parallel processes first; a kernel that hangs
ends the measuring process after a while, and the next start goes on behind it. Times are microseconds inside a CUDA
graph over weights that rotate past the L2 cache. The peer in the same run is cuBLAS (`torch.mm`); of a product that
ends in a draw it is the product as the engine chooses it and a draw apart, and what wins is for the default mode.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draw_case import DrawCase, compile_draw
from kernel_timing import Stopwatch
from matmul_candidates import candidates
from matmul_case import TOLERANCE, MatmulCase, compile_product
from matmul_products import DRAWS, PRODUCTS, Product
from parallel_compile import Compilation, compile_in_processes, compile_share
from program_parser import ProgramParser, names, numbers
from tercet.triton_kernels.matmul_config import PLAIN_ORDER, MatmulConfig
from tercet.triton_kernels.tuning import table_key
from tuned_table import write_table

_HANG_SECONDS = 15.0
_NORM_US = 1.2
_APART = MatmulConfig("apart", 0, 0, 0, 0)
_WHAT = (
    "measure: compile, then time, then select; compile: fill Triton's cache; time: measure what is compiled; "
    "select: what won, from the log into a table; count: the candidates"
)


def work(rows: list[int], names: list[str], kernels: list[str]) -> Iterator[tuple[Product, int, MatmulConfig]]:
    for num_rows in rows:
        for product in (*PRODUCTS, *DRAWS):
            if (not names or product.name in names) and not (num_rows > 512 and product.N > 50000):
                for config in candidates(product, num_rows):
                    if not kernels or config.kernel in kernels:
                        yield product, num_rows, config


def log_key(product: Product, num_rows: int, config: MatmulConfig | None) -> str:
    return json.dumps([product.name, num_rows, asdict(config) if config else "cublas"])


def compilations(rows: list[int], names: list[str], kernels: list[str]) -> Iterator[Compilation]:
    for product, num_rows, config in work(rows, names, kernels):
        compile_one = compile_draw if product.draws else compile_product
        yield f"{product.name} {num_rows} {config}", partial(compile_one, product, num_rows, config)


def measure(rows: list[int], names: list[str], kernels: list[str], log: Path, seconds: float) -> None:
    begin = last = time.monotonic()
    done = {json.dumps(json.loads(line)["key"]) for line in log.read_text().splitlines()} if log.exists() else set()
    stopwatch = Stopwatch()
    current = log_key(PRODUCTS[0], 0, None)

    def watch() -> None:
        while time.monotonic() - last < _HANG_SECONDS:
            time.sleep(0.5)
        write(current, us=None, error="hangs")
        os._exit(3)

    def write(key: str, **result: object) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"key": json.loads(key), **result}) + "\n")

    threading.Thread(target=watch, daemon=True).start()
    case: MatmulCase | DrawCase | None = None
    for product, num_rows, config in work(rows, names, kernels):
        last = time.monotonic()
        if last - begin > seconds:
            print("out of time", flush=True)
            return
        nodes = 24 if num_rows <= 512 else 4
        current = log_key(product, num_rows, config)
        if current in done:
            continue
        if case is None or (case.product, case.x.shape[0]) != (product, num_rows):
            case = (DrawCase if product.draws else MatmulCase)(stopwatch, product, num_rows)
            if not product.normed and log_key(product, num_rows, None) not in done:
                us = stopwatch.microseconds(case.peer, len(case.weights), nodes)
                write(log_key(product, num_rows, None), us=us)
        try:
            error = case.error(config)
            us = stopwatch.microseconds(partial(case.run, config), len(case.weights), nodes)
            write(current, us=us, off=error)
        except Exception as error:  # noqa: BLE001  out of shared memory and the like: a result of this candidate
            write(current, us=None, error=str(error)[:200])
            if "CUDA error" in str(error):
                os._exit(4)


@dataclass
class Best:
    """The fastest right configuration of one product in one bucket, with and without plain order of K."""

    peer: float | None = None
    anyhow: tuple[float, dict[str, Any]] | None = None
    plain: tuple[float, dict[str, Any]] | None = None

    def offer(self, us: float, config: dict[str, Any]) -> None:
        if self.anyhow is None or us < self.anyhow[0]:
            self.anyhow = us, config
        if config["kernel"] in PLAIN_ORDER and (self.plain is None or us < self.plain[0]):
            self.plain = us, config


def select(log: Path, table: Path, margin: float) -> None:
    """Print and write the fastest right candidates; the plain-order one where the default gains less than `margin`.

    A fused norm is taken where it costs less than the norm's own kernel would (_NORM_US).
    """
    best: dict[tuple[str, int], Best] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        name, num_rows, config = row["key"]
        entry = best.setdefault((name, num_rows), Best())
        if config == "cublas":
            entry.peer = row["us"]
        elif row["us"] is not None and row["off"] < TOLERANCE:
            entry.offer(row["us"], config)
    rows: dict[str, dict[str, Any]] = {}
    for (name, num_rows), entry in sorted(best.items(), key=lambda item: (item[0][1], item[0][0])):
        product = next(product for product in (*PRODUCTS, *DRAWS) if product.name == name)
        assert entry.anyhow is not None
        chosen = entry.anyhow
        if entry.plain is not None and entry.plain[0] * (1 - margin) <= chosen[0]:
            chosen = entry.plain
        peer = "apart" if product.draws else "cublas"
        cells = [f"{name:17} M={num_rows:<5} {peer} {entry.peer or float('nan'):8.2f}", show(chosen, entry.peer)]
        key = table_key(product.op, product.N, product.K, torch.bfloat16, False)
        if product.normed:
            whole = best[name.replace("norm_", ""), num_rows].anyhow
            if whole is not None and chosen[0] > whole[0] + _NORM_US:
                print(" | ".join(cells), "| not fused")
                chosen = 0.0, asdict(_APART)
        if product.draws and entry.peer is not None and entry.peer < chosen[0]:
            chosen = entry.peer, asdict(_APART)
        rows.setdefault(key, {})[str(num_rows)] = chosen[1]
        if entry.plain is not None and not product.draws:
            cells.append(show(entry.plain, entry.peer))
            key = table_key(product.op, product.N, product.K, torch.bfloat16, True)
            rows.setdefault(key, {})[str(num_rows)] = entry.plain[1]
        print(" | ".join(cells))
    if str(table) != "-":
        write_table(rows, table)


def show(measured: tuple[float, dict[str, Any]], peer: float | None) -> str:
    us, c = measured[0], MatmulConfig(**measured[1])
    return (
        f"{us:8.2f} ({(peer or float('nan')) / us:.2f}x) {c.kernel} {c.height}x{c.width}x{c.block_k}"
        f" w{c.num_warps} s{c.num_stages} k{c.splits} g{c.group_m} p{c.prefetch}"
    )


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "select", "compile", "time", "count"), help=_WHAT)
    parser.add_argument(
        "--rows", type=numbers, default="1,8,16,64,256,8192", help="numbers of rows to measure, each a bucket"
    )
    parser.add_argument("--products", type=names, default="", help="names, as 8b.down; by default all")
    parser.add_argument("--kernels", type=names, default="", help="kernels of the candidates, by default all")
    parser.add_argument("--log", type=Path, default=Path("tune.jsonl"), help="what was measured")
    parser.add_argument("--table", type=Path, default=Path("-"), help="where what won is written; by default nowhere")
    parser.add_argument("--seconds", type=float, default=480, help="when to stop measuring")
    parser.add_argument("--margin", type=float, default=0.02, help="what leaving the plain order of K has to gain")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = [product.name for product in (*PRODUCTS, *DRAWS)]
    if strange := [name for name in args.products if name not in known]:
        parser.error(f"--products got {strange[0]}; want some of {', '.join(known)}")
    if args.what in ("measure", "time") and not torch.cuda.is_available():
        parser.error(f"`tune.py {args.what}` found no NVIDIA GPU; want one")
    if args.what == "select" and not args.log.is_file():
        parser.error(f"--log is {args.log}, and there is no such file; want one that `tune.py measure` wrote")
    what = args.rows, args.products, args.kernels
    match args.what:
        case "count":
            print(sum(1 for _ in work(*what)))
        case "select":
            select(args.log, args.table, args.margin)
        case "compile":
            compile_share(compilations(*what), args.share)
        case "time":
            measure(*what, args.log, args.seconds)
        case "measure":
            begin = time.monotonic()
            given = zip(("--rows", "--products", "--kernels"), what, strict=True)
            options = [f"{flag}={','.join(map(str, values))}" for flag, values in given]
            command = [sys.executable, __file__]
            compile_in_processes([*command, "compile", *options])
            print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
            for _ in range(6):
                left = args.seconds - (time.monotonic() - begin)
                timer = [*command, "time", *options, "--log", str(args.log), "--seconds", str(left)]
                if left < 10 or subprocess.run(timer).returncode == 0:
                    break
            select(args.log, args.table, args.margin)


if __name__ == "__main__":
    main()
