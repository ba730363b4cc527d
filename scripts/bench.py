"""Measure engines, by `bench.py offline|serve|images|doors|structured|steps|host|planner|trace …`: all claims are its.

offline: the named workloads through an engine's own `LLM` (Tercet, and where importable vLLM, nano-vllm, transformers).
serve:   requests at a rate, from a running engine or any OpenAI endpoint: waiting times, throughput, goodput.
images:  what images cost: the first token behind one, and how many in a second.
doors:   the same requests by the engine's socket and by HTTP: what the HTTP door adds.
structured: what answers that have to match a grammar cost those beside them.
steps:   decode steps alone, for seconds each: time, clock, power and energy.
host:    the engine around a worker that computes nothing: what processes and messages alone can carry.
planner: the scheduler's pure core alone.
trace:   nothing new: one Chrome trace out of what the processes of an engine left in its --trace-dir.
Each prints a table; `--json FILE` writes every figure with versions and the card.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_doors import add_door_flags, run_doors
from bench_engines import ENGINES, BenchEngine
from bench_host import add_host_flags, run_host, run_planner
from bench_images import add_image_flags, run_images
from bench_serve import add_serve_flags, run_serve
from bench_steps import add_step_flags, run_steps
from bench_structured import add_structured_flags, run_structured
from bench_trace import RunRecord, run_trace
from engine_flags import add_engine_flags, given_flags
from program_parser import ProgramParser
from shapes import SHAPES, write_shape
from tercet.engine.errors import TercetError
from tercet.engine.model_files import locate
from tercet.engine.start_clock import in_words
from tercet.ipc.client import ClientError
from workloads import STANDARD, Workload, workload

_OFFLINE_FLAGS = {
    "device", "dtype", "tensor_parallel_size", "data_parallel_size", "load_format", "max_model_len", "max_num_seqs",
    "page_size", "max_num_batched_tokens", "kv_cache_dtype", "kv_cache_memory", "state_dtype",
    "quantization", "activation_dtype",
    "gpu_memory_utilization", "run_ahead", "max_lease", "max_lease_ms", "deterministic", "enforce_eager",
    "keep_cores_awake", "speculative_config", "startup_timeout",
}  # fmt: skip


def measure(engine: BenchEngine, work: Workload, record: RunRecord | None) -> dict[str, Any]:
    """Run one workload several times: the first run warms up, and counts only where a token's time is asked for.

    What the prompts and the first two tokens cost is not decoding; it is measured first, which warms up for those.
    """
    seconds, short = [], 0.0
    if work.measure == "ms/token":
        short = min(_timed(engine, work.prompts, [2] * len(work.prompts)) for _ in range(work.repeats))
    for repeat in range(work.repeats):
        prompts = work.prompts_of(repeat)
        begin_ns = time.monotonic_ns()
        seconds.append(_timed(engine, prompts, work.output_lengths))
        if record is not None:
            record.add(f"{work.name} #{repeat}", begin_ns)
    best = min(seconds[1:]) if len(seconds) > 1 else seconds[0]
    match work.measure:
        case "output tok/s":
            figure = sum(work.output_lengths) / best
        case "prompt tok/s":
            figure = sum(map(len, work.prompts)) / best
        case "ms/token":
            figure = 1e3 * (min(seconds) - short) / (work.output_lengths[0] - 2)
        case "ms to first token":
            figure = 1e3 * best
    return {"workload": work.name, "measure": work.measure, "figure": figure, "seconds": seconds}


def _timed(engine: BenchEngine, prompts: list[list[int]], lengths: list[int]) -> float:
    started = time.perf_counter()
    engine.generate(prompts, lengths)
    return time.perf_counter() - started


def run_offline(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    works = [workload(name) for name in (arguments.workload or STANDARD)]
    options = given_flags(arguments)
    if unused := sorted(options.keys() - _OFFLINE_FLAGS):
        raise ValueError(f"--{unused[0].replace('_', '-')} changes nothing that offline workloads measure")
    if any(not any(work.output_lengths) for work in works) and set(arguments.engine) != {"tercet"}:
        raise ValueError(f"embeddings are measured with tercet alone; got --engine {' '.join(arguments.engine)}")
    if arguments.random_adapters and set(arguments.engine) != {"tercet"}:
        raise ValueError(f"--random-adapters is measured with tercet alone; got --engine {' '.join(arguments.engine)}")
    options["enable_prefix_caching"] = _keep_prefixes(works, arguments.engine)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = str(locate(arguments.model)) if arguments.model else str(write_shape(arguments.shape, Path(scratch)))
        if arguments.shape:
            options.setdefault("load_format", "dummy")
        if arguments.random_adapters:
            from random_adapters import write_adapters  # with torch

            folder = Path(scratch) / "adapter"
            options["adapter"] = write_adapters(Path(model), folder, arguments.random_adapters, arguments.rank)
        record = None
        if arguments.trace is not None:
            options["trace_dir"] = str(Path(scratch) / "trace")
            record = RunRecord(options["trace_dir"])
        for name in arguments.engine:
            started = time.perf_counter()
            engine = ENGINES[name](model, options, arguments.sampling)
            rows.append({"workload": "start", "measure": "s", "figure": time.perf_counter() - started, "engine": name})
            rows[-1]["phases"] = engine.start_phases
            print(f"{name:14} {'start':16} {rows[-1]['figure']:12.2f} s  {in_words(engine.start_phases)}", flush=True)
            for work in works:
                row = {**measure(engine, work, record), "engine": name}
                rows.append(row)
                print(f"{name:14} {work.name:16} {row['figure']:12.3f} {work.measure}", flush=True)
            engine.close()
        if record is not None:
            record.write(arguments.trace)
    return rows


def _keep_prefixes(works: list[Workload], engines: list[str]) -> bool:
    """Whether the workloads are of prompts that begin as others did; other prompts would be found whole in each run."""
    kept = [work.name for work in works if work.begun]
    others = [work.name for work in works if not work.begun]
    if kept and others:
        raise ValueError(f"{kept[0]} is measured with the prefix cache on, {others[0]} with it off; want two commands")
    if kept and (unable := set(engines) - {"tercet", "vllm"}):
        raise ValueError(f"{kept[0]} is measured of tercet and vllm, not of {', '.join(sorted(unable))}")
    return bool(kept)


def environment() -> dict[str, str]:
    """What a figure is worth nothing without."""
    versions = {}
    for package in ("tercet", "torch", "triton", "transformers", "vllm", "msgspec", "pyzmq"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "cpu": platform.processor(), **versions, **_card()}


def _card() -> dict[str, str]:
    if not Path("/dev/nvidiactl").exists():  # torch would take seconds to say so
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"card": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def _rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    match arguments.command:
        case "offline":
            arguments.engine = arguments.engine or ["tercet"]
            return run_offline(arguments)
        case "doors":
            return run_doors(arguments)
        case "images":
            return run_images(arguments)
        case "structured":
            return run_structured(arguments)
        case "steps":
            return run_steps(arguments)
        case "host":
            return run_host(arguments)
        case "serve":
            return run_serve(arguments)
        case "trace":
            return run_trace(arguments.folder, arguments.trace)
        case _:
            return run_planner()


def _sampling(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict) or "max_tokens" in found:
        raise argparse.ArgumentTypeError(f"{text!r} will not do; want an object of sampling parameters, no max_tokens")
    return found


def _command(arguments: argparse.Namespace) -> str:
    """The command line, keys in it left out."""
    command = " ".join(sys.argv)
    for name in ("api_key", "listen_key"):
        if key := getattr(arguments, name, None):
            command = command.replace(key, "…")
    return command


def main() -> int:
    parser = ProgramParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    offline = commands.add_parser("offline", help="named workloads through an engine's LLM")
    model = offline.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="folder, .gguf file, hub id, or `demo`")
    model.add_argument("--shape", choices=sorted(SHAPES), help="a public model's shape with random weights")
    offline.add_argument("--engine", action="append", choices=sorted(ENGINES), help="default: tercet; may be repeated")
    offline.add_argument("workload", nargs="*", help=f"default: {' '.join(STANDARD)}")
    offline.add_argument(
        "--sampling",
        type=_sampling,
        default={},
        metavar="JSON",
        help='beside temperature 0.6 and ignore_eos, such as \'{"top_k": 20, "top_p": 0.95}\'; of tercet and vllm',
    )
    offline.add_argument(
        "--random-adapters",
        type=int,
        default=0,
        metavar="K",
        help="so many LoRA adapters of all layers, which requests take in turns; of tercet",
    )
    offline.add_argument("--rank", type=int, default=16, help="of random adapters")
    offline.add_argument("--trace", type=Path, help="write a Chrome trace of Tercet's processes and the device here")
    add_engine_flags(offline)
    trace = commands.add_parser("trace", help="a Chrome trace out of an engine's --trace-dir")
    trace.add_argument("folder", type=Path, help="what --trace-dir named")
    trace.add_argument("trace", type=Path, help="the file to write; it opens in ui.perfetto.dev")
    add_serve_flags(commands.add_parser("serve", help="requests at a rate, from a socket or an OpenAI endpoint"))
    add_image_flags(commands.add_parser("images", help="the first token behind an image, and images in a second"))
    add_door_flags(commands.add_parser("doors", help="what the HTTP door adds"))
    add_structured_flags(commands.add_parser("structured", help="what answers with a grammar cost those beside them"))
    add_step_flags(commands.add_parser("steps", help="decode steps alone: time, clock, power and energy"))
    add_host_flags(commands.add_parser("host", help="the engine around a worker that computes nothing"))
    commands.add_parser("planner", help="microseconds of the scheduler's core per step")
    for command in commands.choices.values():
        command.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    try:
        if arguments.json:
            arguments.json.open("a").close()  # better found now than after all the work
        rows = _rows(arguments)
    except (ValueError, OSError, EOFError, ClientError, TercetError) as error:
        parser.error(str(error))
    if arguments.json:
        report = {"command": _command(arguments), "environment": environment(), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
