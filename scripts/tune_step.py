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
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from captured_step import MOST_TOKENS, StepModel, share_of_rank
from kernel_timing import Stopwatch
from matmul_candidates import near_candidates
from matmul_case import TOLERANCE, MatmulCase, compile_product
from matmul_products import Product
from parallel_compile import Compilation, compile_in_processes, compile_share
from rank_processes import run_ranks
from shapes import SHAPES
from step_table import Choice, StepTable, choices
from tercet.engine.model_files import locate
from tercet.model.checkpoint import read_config
from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config
from tercet.model.parallel import Group
from tercet.triton_kernels.dispatch import is_hopper
from tercet.triton_kernels.tuning import NEED_TMA, MatmulConfig, load_table, row_bucket
from tuned_table import merge_into_table

MOST_DECODES = 256
"""Steps of more rows are prompts."""
_GAIN = 0.003
"""Of the whole step: what less than this is noise."""


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
    for num_rows in arguments.rows:
        for choice in choices(config, arguments.tensor_parallel_size, alone=arguments.alone):
            if not names or choice.product.name in names:
                yield choice, num_rows, near_candidates(choice.product, num_rows, table, divided=choice.divided)


def is_right(stopwatch: Stopwatch, product: Product, num_rows: int, config: MatmulConfig) -> bool:
    """Against float64; what is in parts, whole."""
    return MatmulCase(stopwatch, product, num_rows).error(replace(config, parts=1)) < TOLERANCE


def compilations(arguments: argparse.Namespace, config: ModelConfig) -> Iterator[Compilation]:
    for choice, num_rows, candidates in work(arguments, config):
        product = replace(choice.product, op=choice.asked_op)
        for one in candidates:
            launch = partial(compile_product, product, num_rows, one, counted=num_rows > MOST_DECODES)
            yield f"{product.name} {num_rows} {one}", launch


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
    how = arguments.tensor_parallel_size, arguments.alone, arguments.layers, arguments.context
    return [arguments.model or arguments.shape, *how]


def tune_on_ranks(arguments: argparse.Namespace, config: ModelConfig) -> None:
    """This process is a rank, or the only one, or starts all."""
    size = 1 if arguments.alone else arguments.tensor_parallel_size
    if size == 1 or arguments.rank is not None:
        rank = arguments.rank or 0
        torch.cuda.set_device(rank)
        tune(arguments, config, Group.join(rank, size, torch.device("cuda", rank), arguments.rendezvous, 120.0))
        return
    if torch.cuda.device_count() < size:
        raise SystemExit(f"{size} ranks, but there are {torch.cuda.device_count()} GPUs; --alone plays one of them")
    options = [word for word in sys.argv[1:] if word not in ("measure", "time")]
    run_ranks([sys.executable, __file__, "time", *options], size, lambda line: print(line, end="", flush=True))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="?",
        default="measure",
        choices=("measure", "compile", "time", "count"),
        help="measure (the default): compile, then time; compile: fill Triton's cache; time: measure what is compiled; "
        "count: the candidates",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    which.add_argument("--model", help="a folder, or a name on the hub; its config.json is enough")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--alone", action="store_true", help="one GPU plays one of the ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--rows", type=_numbers, default="8,64,256", help="rows of the steps; each stands for its bucket"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens behind each row")
    parser.add_argument("--layers", type=int, default=12, help="of the model, at most: more take longer to capture")
    parser.add_argument("--products", default="", help="gate_up,down,qkv,o,lm_head; by default all")
    parser.add_argument("--gpu", default="NVIDIA H200", help="whose table's winners are tried")
    parser.add_argument("--log", type=Path, default=Path("tune_step.jsonl"), help="what was measured")
    parser.add_argument("--table", type=Path, help="merge what won into this table")
    parser.add_argument("--seconds", type=float, default=480, help="when to stop measuring (default: %(default)s)")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if wrong := [rows for rows in arguments.rows if not 1 <= rows <= MOST_TOKENS]:
        parser.error(f"--rows got {wrong[0]}; want 1 to {MOST_TOKENS}")
    config = read_config(locate(arguments.model)) if arguments.model else parse_config(SHAPES[arguments.shape])
    match arguments.what:
        case "count":
            print(sum(len(candidates) for _, _, candidates in work(arguments, config)))
        case "compile":
            compile_share(compilations(arguments, config), arguments.share)
        case "time":
            tune_on_ranks(arguments, config)
        case "measure":
            if is_hopper(torch.device("cuda", 0)):
                options = [word for word in sys.argv[1:] if word != "measure"]
                compile_in_processes([sys.executable, __file__, "compile", *options])
            tune_on_ranks(arguments, config)


if __name__ == "__main__":
    main()
