"""Decode steps of a public shape on one GPU, replayed for seconds: how long one takes, at which clock, for what energy.

What an engine's steps take without its host. A card that takes all the power it may lowers its clock after a moment, so
a figure of a moment says little.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from shapes import SHAPES
from tercet.engine.config import ActivationDType, KvCacheDType, StateDType

if TYPE_CHECKING:
    from captured_step import CapturedStep
    from power_meter import PowerMeter
    from tercet.model.config import ModelConfig

_ROUND_MS = 60.0
_MOST_REPLAYS = 250
_SETTLE_SECONDS = 0.7


def add_step_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True, help="a public model's shape, random weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256], help="of the steps")
    parser.add_argument("--context", type=int, default=1088, help="tokens behind each row")
    parser.add_argument("--kv-cache-dtype", choices=get_args(KvCacheDType), default="auto", help="as of an engine")
    parser.add_argument("--state-dtype", choices=get_args(StateDType), default="auto", help="as of an engine")
    parser.add_argument("--activation-dtype", choices=get_args(ActivationDType), default="auto", help="as of an engine")
    parser.add_argument("--guesses", type=int, default=0, help="tokens that each row tries beside its own")
    parser.add_argument(
        "--guess-layer",
        choices=["own", "eagle3"],
        help="those are what a layer guesses: the model's own, or one like its layers with a head for 32,000 tokens",
    )
    parser.add_argument("--random-adapters", type=int, default=0, help="LoRA adapters, through which rows go by turns")
    parser.add_argument("--rank", type=int, default=16, help="of random adapters")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each")


def run_steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of rows."""
    if min(arguments.rows) < 1 or arguments.context < 1:
        raise ValueError(f"--rows got {min(arguments.rows)} and --context {arguments.context}; want 1 or more")
    if arguments.random_adapters < 0 or arguments.rank < 1:
        given = f"--random-adapters got {arguments.random_adapters} and --rank {arguments.rank}"
        raise ValueError(f"{given}; want 0 or more, of rank 1 or more")
    if arguments.random_adapters and arguments.guesses:
        raise ValueError("--random-adapters came with --guesses; want one of them")
    if arguments.guess_layer and not arguments.guesses:
        raise ValueError("--guess-layer came without --guesses; want how many it is to guess")
    import torch  # here, since other measurements do without: it takes seconds

    if not torch.cuda.is_available():
        raise ValueError("`bench.py steps` found no NVIDIA GPU; want one")
    from captured_step import StepModel
    from power_meter import PowerMeter
    from tercet.model.adapters import Ranks, module_sizes
    from tercet.model.checkpoint import parse_settings
    from tercet.model.eagle_config import parse_eagle
    from tercet.model.load import with_guesser, with_state_dtype
    from tercet.model.parallel import Group

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    meter = PowerMeter(str(torch.cuda.get_device_properties(device).uuid))
    config, quantization = parse_settings(SHAPES[arguments.shape])
    if arguments.state_dtype != "auto":
        config = with_state_dtype(config, arguments.state_dtype)
    eagle = None
    if arguments.guess_layer == "own":
        config = with_guesser(config)
    elif arguments.guess_layer == "eagle3":
        eagle = parse_eagle(_like(config), config)
        config = replace(config, guesses=True, guesser=None)
    sizes = max(arguments.rows), arguments.context
    group = Group.join(0, 1, device, "", 120.0)
    adapters = None
    if arguments.random_adapters:
        ranks = {name: arguments.rank for layer in range(config.num_layers) for name in module_sizes(config, layer)}
        adapters = Ranks(arguments.random_adapters, ranks)
    model = StepModel(
        config, group, *sizes, arguments.kv_cache_dtype, quantization, arguments.guesses, adapters, eagle,
        rounds_rows=arguments.activation_dtype == "fp8",
    )  # fmt: skip
    step = model.trial if arguments.guesses else model.decode
    print(f"{'rows':>6} {'us':>9} {'MHz':>6} {'W':>6} {'mJ':>9}")
    results = []
    for num_rows in arguments.rows:
        row = _measure(step(num_rows), meter, arguments.seconds)
        results.append({"rows": num_rows, **row})
        print(f"{num_rows:6} {row['us']:9.1f} {row['mhz']:6.0f} {row['watts']:6.0f} {row['mj']:9.1f}", flush=True)
    return results


def _like(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of a layer that guesses for a model and has its sizes."""
    return {
        "draft_vocab_size": 32_000,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }


def _measure(step: "CapturedStep", meter: "PowerMeter", seconds: float) -> dict[str, float]:
    """Once the clock has followed the power."""
    replays = max(4, min(_MOST_REPLAYS, int(_ROUND_MS / step.milliseconds(4))))
    settled = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < settled:
        step.milliseconds(replays)
    rounds, clocks = list[float](), list[int]()
    began, joules = time.monotonic(), meter.joules()
    while not rounds or time.monotonic() < began + seconds:
        rounds.append(step.milliseconds(replays))
        clocks.append(meter.megahertz())
    joules = meter.joules() - joules
    return {
        "us": 1e3 * statistics.median(rounds),
        "mhz": statistics.median(clocks),
        "watts": joules / (time.monotonic() - began),
        "mj": 1e3 * joules / (len(rounds) * (replays + 1)),  # one more begins each round
    }
