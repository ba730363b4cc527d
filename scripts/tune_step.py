"""Choose configurations of products inside the whole captured step of a model, and write them into a GPU's table.

    python scripts/tune_step.py --shape qwen3-32b --tensor-parallel-size 4 --rows 64,256 --log step.jsonl --seconds 500

In a chain of kernels the fastest alone is not the fastest. Ranks run on as many GPUs; with `--alone` one GPU plays one
of them, sums left out. What is tried won for other weights, or is next to it: `tune.py` looks further. A winner is
checked against float64 before it is taken; lines of deterministic mode stay as they are. Resumable by log and table.

`--rows` up to 256 are decode steps; more, prompts of so many tokens. `--together 5` then tries the five fastest of
each product in all pairs: one that leaves the kernels behind it more room may pay only beside one that uses it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from captured_step import MOST_TOKENS, StepModel, share_of_rank
from kernel_timing import Stopwatch
from matmul_candidates import asking_ahead, near_candidates
from matmul_case import TOLERANCE, MatmulCase, compile_product
from matmul_products import Product
from pair_search import best_together
from parallel_compile import Compilation, compile_in_processes, compile_share
from program_parser import ProgramParser, names, numbers
from rank_processes import run_ranks
from shapes import PLAIN_SHAPES, SHAPES
from step_table import Choice, StepTable, choices
from tercet.engine.errors import TercetError
from tercet.engine.model_files import locate
from tercet.model.checkpoint import read_config
from tercet.model.config import ModelConfig
from tercet.model.config_json import parse_config
from tercet.model.parallel import Group
from tercet.triton_kernels.dispatch import is_hopper
from tercet.triton_kernels.matmul_config import NEED_TMA, MatmulConfig
from tercet.triton_kernels.tuning import load_table, row_bucket
from tuned_table import merge_into_table

MOST_DECODES = 256
"""Steps of more rows are prompts."""
_NEVER = float("inf")
_GAIN = 0.003
"""Of the whole step: what less than this is noise."""


class StepTuner:
    """One rank's. All ranks do the same: they measure the slowest, and agree on what is decided otherwise."""

    def __init__(self, arguments: argparse.Namespace, config: ModelConfig, group: Group) -> None:
        self._end = time.monotonic() + arguments.seconds
        self._arguments = arguments
        self._group = group
        self._stopwatch = Stopwatch()
        self._log = Log(arguments.log, writes=group.rank == 0)
        self._work = list(work(arguments, config))
        size = arguments.tensor_parallel_size
        self._table = StepTable(group.device, arguments.table)
        for choice in choices(config, size, alone=arguments.alone):
            self._table.begin(choice, norm_apart=arguments.alone and size > 1)
        share = share_of_rank(config, size // group.size, min(arguments.layers, config.num_layers))
        decodes = [num_rows for _, num_rows, _ in self._work if num_rows <= MOST_DECODES]
        self._model = StepModel(share, group, max(decodes, default=1), arguments.context)
        self._fastest: dict[int, dict[Choice, list[MatmulConfig]]] = {}
        """Of steps of so many rows each product's configurations: the chosen one, then the others by their times."""

    def run(self) -> None:
        for choice, num_rows, candidates in self._work:
            self._choose(choice, num_rows, candidates)
        for num_rows in self._fastest if self._arguments.together > 1 else ():
            self._choose_together(num_rows)

    def _choose(self, choice: Choice, num_rows: int, candidates: list[MatmulConfig]) -> None:
        """A product's configuration, while the others stay as they are; then what it asks the L2 cache for ahead."""
        self._table.part_norm(choice, row_bucket(num_rows))
        chosen = self._table.get(choice, row_bucket(num_rows))
        self._us(num_rows, {choice: chosen})  # what is new is loaded
        first = self._us(num_rows, {choice: chosen})
        times: dict[MatmulConfig, float] = {}
        chosen, best = self._fastest_of(candidates, choice, num_rows, (chosen, first), times)
        ahead = asking_ahead(chosen, num_rows, choice.product.K)
        chosen, best = self._fastest_of(ahead, choice, num_rows, (chosen, best), {})
        self._table.put(choice, row_bucket(num_rows), chosen)
        self._say({choice: chosen}, num_rows, first, best)
        others = sorted((us, repr(config), config) for config, us in times.items() if config != chosen and us < _NEVER)
        self._fastest.setdefault(num_rows, {})[choice] = [chosen, *(config for *_, config in others)]

    def _fastest_of(
        self,
        candidates: list[MatmulConfig],
        choice: Choice,
        num_rows: int,
        so_far: tuple[MatmulConfig, float],
        times: dict[MatmulConfig, float],
    ) -> tuple[MatmulConfig, float]:
        """The fastest right one and the step with it; what was tried goes into `times`."""
        hopper = is_hopper(self._group.device)
        chosen, best = so_far
        for candidate in candidates:
            if not self._in_time():
                break
            if candidate.kernel in NEED_TMA and not hopper:
                continue
            key = [_name(self._arguments), choice.product.name, num_rows, asdict(candidate)]
            us = times[candidate] = self._logged(key, num_rows, {choice: candidate}, best)
            if us >= best * (1 - _GAIN) or not self._is_right({choice: candidate}, num_rows):
                continue
            before, us = self._us(num_rows, {choice: chosen}), self._us(num_rows, {choice: candidate})
            if us < before * (1 - _GAIN):  # at once: a card gets slower as it gets warm
                chosen, best = candidate, us
        return chosen, best

    def _choose_together(self, num_rows: int) -> None:
        """All products' configurations, from the fastest of each."""
        fastest = {choice: found[: self._arguments.together] for choice, found in self._fastest[num_rows].items()}

        def cost(configs: Mapping[Choice, MatmulConfig]) -> float:
            named = [[choice.product.name, asdict(config)] for choice, config in configs.items()]
            return self._logged([_name(self._arguments), "together", num_rows, named], num_rows, configs)

        chosen = {choice: found[0] for choice, found in fastest.items()}
        best = best_together(fastest, cost, gain=_GAIN, in_time=self._in_time)
        before, after = self._us(num_rows, chosen), self._us(num_rows, best)
        if after >= before * (1 - _GAIN) or not self._is_right(best, num_rows):
            self._us(num_rows, chosen)
            best = chosen
        changed = {choice: config for choice, config in best.items() if config != chosen[choice]}
        self._say(changed, num_rows, before, after)

    def _us(self, num_rows: int, configs: Mapping[Choice, MatmulConfig], at_most: float = _NEVER) -> float:
        """Of a step with these in the table from now on, roughly if it is far above `at_most`."""
        torch.cuda.empty_cache()  # what earlier graphs had is not free before
        for choice, config in configs.items():
            self._table.put(choice, row_bucket(num_rows), config)
        step = self._model.decode(num_rows) if num_rows <= MOST_DECODES else self._model.prompt(num_rows)
        return step.microseconds(at_most)

    def _logged(
        self, key: list[Any], num_rows: int, configs: Mapping[Choice, MatmulConfig], at_most: float = _NEVER
    ) -> float:
        """The same, unless the log has it; infinite for what a card has no room for."""
        us = self._log.get(key)
        if us is None:
            try:
                us = self._us(num_rows, configs, at_most)
            except (OutOfResources, ValueError, RuntimeError) as error:
                us = _NEVER
                if "CUDA error" in str(error):
                    raise
            self._log.put(key, us)
        return us

    def _is_right(self, configs: Mapping[Choice, MatmulConfig], num_rows: int) -> bool:
        right = [is_right(self._stopwatch, choice.product, num_rows, config) for choice, config in configs.items()]
        return bool(self._group.min(int(all(right))))

    def _in_time(self) -> bool:
        return bool(self._group.min(int(time.monotonic() < self._end)))

    def _say(self, configs: Mapping[Choice, MatmulConfig], num_rows: int, before: float, after: float) -> None:
        """Print what has been chosen, and write it into the table."""
        if self._group.rank != 0:
            return
        if not configs:
            print(f"{num_rows:5} together {before:9.1f} us: none are faster", flush=True)
        for choice, config in configs.items():
            print(f"{num_rows:5} {choice.product.name:8} {before:9.1f} -> {after:9.1f} us: {config}", flush=True)
            if self._arguments.table is not None:
                merge_into_table({choice.line: self._table.row(choice, row_bucket(num_rows))}, self._arguments.table)


def work(arguments: argparse.Namespace, config: ModelConfig) -> Iterator[tuple[Choice, int, list[MatmulConfig]]]:
    """What is tried, in order."""
    # A copy: what is tried goes into the table itself, if it is this GPU's.
    table = {line: dict(buckets) for line, buckets in load_table(arguments.gpu).items()}
    for num_rows in arguments.rows:
        for choice in choices(config, arguments.tensor_parallel_size, alone=arguments.alone):
            if not arguments.products or choice.product.name in arguments.products:
                found = near_candidates(choice.product, num_rows, table, divided=choice.divided)
                if found:  # of many rows no product norms its own
                    yield choice, num_rows, found


def is_right(stopwatch: Stopwatch, product: Product, num_rows: int, config: MatmulConfig) -> bool:
    """Against float64."""
    return MatmulCase(stopwatch, product, num_rows).error(config) < TOLERANCE


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
        torch.cuda.set_device(rank := arguments.rank or 0)
        group = Group.join(rank, size, torch.device("cuda", rank), arguments.rendezvous, 120.0)
        StepTuner(arguments, config, group).run()
        group.close()
        return
    if torch.cuda.device_count() < size:
        raise SystemExit(f"{size} ranks, but there are {torch.cuda.device_count()} GPUs; --alone plays one of them")
    options = [word for word in sys.argv[1:] if word not in ("measure", "time")]
    run_ranks([sys.executable, __file__, "time", *options], size, lambda line: print(line, end="", flush=True))


def main() -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        default="measure",
        choices=("measure", "compile", "time", "count"),
        help="measure (the default): compile, then time; compile: fill Triton's cache; time: measure what is compiled; "
        "count: the candidates",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=PLAIN_SHAPES, default="qwen3-8b", help="a public model's")
    which.add_argument("--model", help="a folder, or a name on the hub; its config.json is enough")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share the model")
    parser.add_argument("--alone", action="store_true", help="one GPU plays one of the ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=numbers, default="8,64,256", help="of the steps; each stands for its bucket")
    parser.add_argument("--context", type=int, default=1024, help="tokens behind each row")
    parser.add_argument("--layers", type=int, default=12, help="of the model, at most: more take longer to capture")
    parser.add_argument("--products", type=names, default="", help="gate_up,down,qkv,o,lm_head; by default all")
    parser.add_argument("--together", type=int, default=0, help="how many of each product are tried in pairs")
    parser.add_argument("--gpu", default="NVIDIA H200", help="whose table's winners are tried")
    parser.add_argument("--log", type=Path, default=Path("tune_step.jsonl"), help="what was measured, and is not again")
    parser.add_argument("--table", type=Path, help="merge what won into it; begin with what it holds")
    parser.add_argument("--seconds", type=float, default=480, help="when to stop measuring")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if wrong := [rows for rows in arguments.rows if not 1 <= rows <= MOST_TOKENS]:
        parser.error(f"--rows got {wrong[0]}; want 1 to {MOST_TOKENS}")
    try:
        config = read_config(locate(arguments.model)) if arguments.model else parse_config(SHAPES[arguments.shape])
        config.check_tensor_parallel(arguments.tensor_parallel_size)
    except (ValueError, OSError, TercetError) as error:
        parser.error(str(error))
    known = [choice.product.name for choice in choices(config, arguments.tensor_parallel_size, alone=arguments.alone)]
    if strange := [name for name in arguments.products if name not in known]:
        parser.error(f"--products got {strange[0]}; want some of {', '.join(known)}")
    if arguments.what in ("measure", "time") and not torch.cuda.device_count():
        parser.error(f"`tune_step.py {arguments.what}` found no NVIDIA GPU; want one")
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
