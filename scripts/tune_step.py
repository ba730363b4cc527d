"""Choose configurations of products inside the whole captured step of a model, and write them into a GPU's table.

    python scripts/tune_step.py --shape qwen3-32b --tensor-parallel-size 4 --rows 64,256 --log step.jsonl --seconds 500

In a chain of kernels the fastest alone is not the fastest. Ranks run on as many GPUs; with `--alone` one GPU plays one
of them, sums left out. What is tried won for other weights, or is next to it: `tune.py` looks further. A winner is
checked against float64 before it is taken; lines of deterministic mode are left as they are. Resumable: what the log
holds is not measured again.

`--rows` up to 256 are decode steps; more, prompts of so many tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from captured_step import StepModel, share_of_rank
from kernel_timing import Stopwatch
from matmul_candidates import Product, near_candidates
from matmul_case import MatmulCase, compile_product
from shapes import SHAPES
from tercet.engine.model_files import locate
from tercet.model.checkpoint import read_config
from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config
from tercet.model.parallel import Group
from tercet.triton_kernels import matmul_launch, tuning
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import gpu_name, is_hopper
from tercet.triton_kernels.tuning import NEED_TMA, MatmulConfig, load_table, row_bucket, table_key
from tuned_table import merge_into_table

MOST_DECODES = 256
"""Steps of more rows are prompts."""
_TOLERANCE = 5e-3  # relative to float64; bf16 outputs alone are 2e-3 off
_GAIN = 0.003
"""Of the whole step: what less than this is noise."""


@dataclass(frozen=True)
class Choice:
    """A product of a rank's step, and the line of the table that is asked for it there."""

    product: Product
    asked_op: str
    """What one GPU runs that plays a rank: the residual is added there by what else the sum over ranks would add to."""
    behind_sum: bool
    """Whether a sum over ranks stands before it."""

    @property
    def line(self) -> str:
        return self._line(self.product.op)

    @property
    def asked(self) -> str:
        return self._line(self.asked_op)

    @property
    def divided(self) -> bool:
        """Whether what comes next adds up parts of it."""
        return self.product.name in ("o", "down")

    def _line(self, op: str) -> str:
        return table_key(op, self.product.N, self.product.K, torch.bfloat16, False)


def choices(config: ModelConfig, size: int, *, alone: bool) -> list[Choice]:
    """The products of one of `size` ranks, the largest first. `alone`: one GPU plays it."""
    D, H, F = config.hidden_size, config.num_heads // size * config.head_dim, config.intermediate_size // size
    qkv = H + 2 * config.kv_heads_per_rank(size) * config.head_dim
    adds = "matmul_add" if size == 1 else "matmul"
    products = (
        Product("gate_up", "matmul_silu_and_mul", 2 * F, D),
        Product("down", adds, D, F),
        Product("qkv", "matmul", qkv, D),
        Product("o", adds, D, H),
        Product("lm_head", "matmul", config.vocab_per_rank(size), D),
    )
    return [
        Choice(
            one,
            "matmul_add" if alone and one.name in ("o", "down") else one.op,
            behind_sum=size > 1 and not alone and one.name in ("gate_up", "qkv"),
        )
        for one in products
    ]


class StepTable:
    """The table of this GPU as the engine reads it, with configurations that are tried."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lines = load_table(gpu_name(device))
        self._known = set(self._lines)

    def begin(self, choice: Choice, *, norm_apart: bool) -> None:
        """Give a product a line of its own in every bucket, with what serves it so far."""
        N, K = choice.product.N, choice.product.K
        so_far = {
            bucket: tuning.choose_matmul(choice.asked_op, bucket, N, K, torch.bfloat16, False, self._device)
            for bucket in tuning.ROW_BUCKETS
        }
        self._lines.setdefault(choice.asked, so_far)
        if norm_apart:  # as where a sum over ranks stands before the norm
            for op in ("rms_norm_matmul", "rms_norm_matmul_silu_and_mul"):
                apart = {bucket: MatmulConfig("apart", 0, 0, 0, 0) for bucket in tuning.ROW_BUCKETS}
                self._lines[table_key(op, N, K, torch.bfloat16, False)] = apart
        self._forget()

    def put(self, choice: Choice, bucket: int, config: MatmulConfig) -> None:
        """From now on this product runs so for so many rows."""
        self._lines[choice.asked][bucket] = config
        self._forget()

    def get(self, choice: Choice, bucket: int) -> MatmulConfig:
        return self._lines[choice.asked][min(size for size in self._lines[choice.asked] if size >= bucket)]

    def row(self, choice: Choice, bucket: int) -> dict[str, dict[str, Any]]:
        """What to write of a line: this bucket, or all if there was no such line."""
        line = self._lines[choice.asked]
        buckets = [bucket] if choice.line in self._known else sorted(line)
        return {str(one): asdict(line[one]) for one in buckets}

    def _forget(self) -> None:
        for cached in (tuning._choose, tuning._tuned):
            cached.cache_clear()


def tune(arguments: argparse.Namespace, config: ModelConfig, group: Group) -> None:
    """All ranks do the same: what they measure is the slowest's, and they agree on what is decided otherwise."""
    end = time.monotonic() + arguments.seconds
    size, stopwatch = arguments.tensor_parallel_size, Stopwatch()
    log = Log(arguments.log, writes=group.rank == 0)
    hopper = is_hopper(group.device)
    tried = {(choice, num_rows): found for choice, num_rows, found in work(arguments, config)}
    table = StepTable(group.device)
    for choice in choices(config, size, alone=arguments.alone):
        table.begin(choice, norm_apart=arguments.alone and size > 1)
    num_layers = min(arguments.layers, config.num_layers)
    share = share_of_rank(config, size // group.size, num_layers)
    model = StepModel(
        share, group, max((rows for _, rows in tried if rows <= MOST_DECODES), default=1), arguments.context
    )
    for (choice, num_rows), candidates in tried.items():
        product, bucket = choice.product, row_bucket(num_rows)

        def us_with(config: MatmulConfig, num_rows: int = num_rows, choice: Choice = choice) -> float:
            table.put(choice, row_bucket(num_rows), config)
            step = model.decode(num_rows) if num_rows <= MOST_DECODES else model.prompt(num_rows)
            return step.microseconds()

        chosen = table.get(choice, bucket)
        us_with(chosen)  # what is new is loaded
        best = first = us_with(chosen)
        for candidate in candidates:
            if not group.min(int(time.monotonic() < end)):
                break
            if candidate.kernel in NEED_TMA and not hopper:
                continue
            key = [_name(arguments), product.name, num_rows, asdict(candidate)]
            us = log.get(key)
            if us is None:
                try:
                    us = us_with(candidate)
                except (OutOfResources, ValueError, RuntimeError) as error:
                    us = float("inf")
                    if "CUDA error" in str(error):
                        raise
                log.put(key, us)
            if us >= best * (1 - _GAIN):
                continue
            if not group.min(int(is_right(stopwatch, product, num_rows, candidate))):
                continue
            before, us = us_with(chosen), us_with(candidate)  # at once: a card gets slower as it gets warm
            if us < before * (1 - _GAIN):
                chosen, best = candidate, us
        table.put(choice, bucket, chosen)
        if group.rank != 0:
            continue
        print(f"{num_rows:5} {product.name:8} {first:9.1f} -> {best:9.1f} us: {chosen}", flush=True)
        if arguments.table is not None:
            merge_into_table({choice.line: table.row(choice, bucket)}, arguments.table)


def work(arguments: argparse.Namespace, config: ModelConfig) -> Iterator[tuple[Choice, int, list[MatmulConfig]]]:
    """What is tried, in order."""
    names = [name for name in arguments.products.split(",") if name]
    # A copy: what is tried goes into the table itself, if it is this GPU's.
    table = {line: dict(buckets) for line, buckets in load_table(arguments.gpu).items()}
    for num_rows in (int(number) for number in arguments.rows.split(",")):
        for choice in choices(config, arguments.tensor_parallel_size, alone=arguments.alone):
            if not names or choice.product.name in names:
                kinds = {"divided": choice.divided, "behind_sum": choice.behind_sum}
                yield choice, num_rows, near_candidates(choice.product, num_rows, table, **kinds)


def is_right(stopwatch: Stopwatch, product: Product, num_rows: int, config: MatmulConfig) -> bool:
    """Against float64; what is in parts, whole."""
    return MatmulCase(stopwatch, product, num_rows).error(replace(config, parts=1)) < _TOLERANCE


def compile_share(arguments: argparse.Namespace, config: ModelConfig) -> None:
    """Fill Triton's cache with this process's part of the kernels."""
    share, shares = map(int, arguments.share.split("/"))
    matmul_launch.is_hopper = lambda device: True
    matmul_launch.multiprocessors = lambda device: 132
    cases = [(choice, rows, one) for choice, rows, candidates in work(arguments, config) for one in candidates]
    for choice, num_rows, candidate in cases[share::shares]:
        try:
            with compiling_for(90):
                product = replace(choice.product, op=choice.asked_op)
                compile_product(product, num_rows, candidate, counted=num_rows > MOST_DECODES)
        except Exception as error:  # noqa: BLE001  a candidate that does not compile is a result, not a failure
            print("compile", choice.product.name, num_rows, candidate, str(error)[:200], flush=True)


class Log:
    """What was measured, a line each."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path
        self._writes = writes
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._us: dict[str, float] = {json.dumps(row["key"]): row["us"] for row in rows}

    def get(self, key: list[Any]) -> float | None:
        return self._us.get(json.dumps(key))

    def put(self, key: list[Any], us: float) -> None:
        self._us[json.dumps(key)] = us
        if self._writes:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "us": us}) + "\n")


def _name(arguments: argparse.Namespace) -> list[Any]:
    """Of the model and how it is run."""
    return [arguments.model or arguments.shape, arguments.tensor_parallel_size, arguments.alone, arguments.layers]


def run_ranks(arguments: argparse.Namespace, config: ModelConfig) -> None:
    """This process is a rank, or the only one, or starts all."""
    size = 1 if arguments.alone else arguments.tensor_parallel_size
    if size == 1 or arguments.rank is not None:
        rank = arguments.rank or 0
        torch.cuda.set_device(rank)
        tune(arguments, config, Group.join(rank, size, torch.device("cuda", rank), arguments.rendezvous, 120.0))
        return
    options = [word for word in sys.argv[1:] if word not in ("measure", "time")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "time", *options, "--rendezvous", f"{folder}/rendezvous"]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(size)]
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(0.1)  # one that failed leaves the others waiting
            if any(codes):
                raise SystemExit(f"a rank failed: {codes}")
        finally:
            for process in ranks:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="measure", choices=("measure", "compile", "time", "count"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    which.add_argument("--model", help="a folder, or a name on the hub; its config.json is enough")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="one GPU plays one of the ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rows", default="8,64,256", help="rows of the steps; each stands for its bucket")
    parser.add_argument("--context", type=int, default=1024, help="tokens behind each row")
    parser.add_argument("--layers", type=int, default=12, help="of the model, at most: more take longer to capture")
    parser.add_argument("--products", default="", help="gate_up,down,qkv,o,lm_head; by default all")
    parser.add_argument("--gpu", default="NVIDIA H200", help="whose table's winners are tried")
    parser.add_argument("--log", type=Path, default=Path("tune_step.jsonl"))
    parser.add_argument("--table", type=Path, help="merge what won into this table")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--share", default="0/1")
    arguments = parser.parse_args()
    config = read_config(locate(arguments.model)) if arguments.model else parse_config(SHAPES[arguments.shape])
    match arguments.what:
        case "count":
            print(sum(len(candidates) for _, _, candidates in work(arguments, config)))
        case "compile":
            compile_share(arguments, config)
        case "time":
            run_ranks(arguments, config)
        case "measure":
            shares = (os.cpu_count() or 1) if is_hopper(torch.device("cuda", 0)) else 0
            options = [word for word in sys.argv[1:] if word != "measure"]
            command = [sys.executable, __file__, "compile", *options]
            compilers = [subprocess.Popen([*command, "--share", f"{share}/{shares}"]) for share in range(shares)]
            for compiler in compilers:
                compiler.wait()
            run_ranks(arguments, config)


if __name__ == "__main__":
    main()
