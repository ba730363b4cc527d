"""The command-line flags that describe an engine, shared by serve.py, chat.py and bench.py.

One flag per field of `EngineConfig`, with vLLM's spelling where vLLM has the flag. The values are checked by
`EngineConfig` itself, so that a wrong one reads the same from every door.
"""

import argparse
import re
from typing import Any, get_args

import msgspec

from tercet.engine.config import (
    PAGE_SIZES,
    ActivationDType,
    Device,
    DType,
    EngineConfig,
    GenerationConfig,
    KvCacheDType,
    LoadFormat,
    Quantization,
    ReasoningParser,
    StateDType,
    ToolCallParser,
)

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def byte_count(text: str) -> int:
    """`4GiB`, `512MiB`, `2e9` or a plain number, as bytes."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmg]i?)?b?", text.strip().lower())
    try:
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2] or ""])
    except (ValueError, OverflowError):  # `1.2.3`, `1e999`
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no size; want a number with KiB, MiB, GiB, KB, MB, GB or nothing")


def json_map(text: str) -> dict[str, object]:
    """`{"name": value}`."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; want a JSON object") from None


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add every engine flag. What is not given stays out of the namespace, so EngineConfig's defaults hold."""

    def flag(name: str, help: str, **options: object) -> None:
        default = next(f.default for f in _fields() if f.name == name.replace("-", "_"))
        shown = f" (default: {default})" if default not in (None, False, ()) else ""
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help + shown, **options)  # type: ignore[arg-type]

    flag("served-model-name", "the name clients see; default: the model as given")
    flag(
        "adapter",
        "a LoRA adapter that requests may ask for: a folder in PEFT's layout or a hub id; may be repeated",
        action="append",
        metavar="NAME=FOLDER",
    )
    flag("max-adapters", "places for adapters that come and go while the engine runs, --adapter's included", type=int)
    flag("max-adapter-rank", "highest rank of what is in such a place; memory is taken for as much", type=int)
    flag(
        "classifier-tokens",
        "classify by these tokens' logits, as rerankers do: the last one's, less the other's, as in: no yes",
        nargs="+",
        metavar="TOKEN",
    )
    flag("chat-template", "a file, in Jinja, in place of the checkpoint's chat template", metavar="FILE")
    flag(
        "generation-config",
        "what holds where a request says nothing; auto: what the checkpoint wants; none: neutral values",
        choices=get_args(GenerationConfig),
    )
    flag(
        "override-generation-config",
        'some of it, whatever the checkpoint wants: JSON such as {"temperature": 0.6, "max_new_tokens": 4096}',
        type=json_map,
        metavar="JSON",
    )
    flag("pair-template", "a file: what is written around a query and a document, in Jinja", metavar="FILE")
    flag(
        "allowed-origins",
        "pages of these may read what the HTTP door says, as https://chat.example.com, or *; default: of none",
        nargs="+",
        metavar="ORIGIN",
    )
    flag(
        "limit-mm-per-prompt",
        'images that a request may bring: JSON such as {"image": 8}; default: 16; 0: none, and what looks at images is '
        "not loaded",
        type=json_map,
        metavar="JSON",
    )
    flag(
        "mm-processor-kwargs",
        "pixels that images have when the model sees them, or tiles, whatever the checkpoint wants: JSON such as "
        '{"min_pixels": 65536, "max_pixels": 1048576}, or {"max_patches": 4}',
        type=json_map,
        metavar="JSON",
    )
    flag(
        "allowed-media-domains",
        "hosts from which the HTTP door fetches images that requests name, as example.org; default: from none",
        nargs="+",
        metavar="HOST",
    )
    flag(
        "allowed-local-media-path",
        "a folder of which requests to the HTTP door may name images, as file://FOLDER/x.png; default: of none",
        metavar="FOLDER",
    )
    flag("device", "where to run", choices=get_args(Device))
    flag(
        "dtype",
        "type of weights and KV cache; auto: the checkpoint's on a GPU (bfloat16 if quantized), float32 on CPUs",
        choices=get_args(DType),
    )
    flag("tensor-parallel-size", "ranks that share the model, one process each", type=int)
    flag(
        "data-parallel-size",
        "replicas of the model, each with ranks, a cache and a queue of its own, behind the same doors; what bounds "
        "these is for each",
        type=int,
    )
    flag(
        "load-format",
        "dummy: random weights; null: no model, to measure the engine itself",
        choices=get_args(LoadFormat),
    )
    flag("null-step-ms", "a null model's step takes so long", type=float)
    flag("seed", "seeds dummy weights and requests that bring no seed", type=int)
    flag("max-model-len", "most tokens of prompt plus answer; default: what the checkpoint allows", type=int)
    flag("max-num-seqs", "most requests in one step, up to 4096", type=int)
    flag("max-num-batched-tokens", "most tokens in one step", type=int)
    flag("page-size", "tokens in a page of the KV cache", type=int, choices=PAGE_SIZES)
    flag(
        "kv-cache-dtype",
        "type of keys and values; auto: as --dtype; fp8: 8 bits (e4m3), half the memory and less exact",
        choices=get_args(KvCacheDType),
    )
    flag(
        "kv-cache-memory",
        "KV cache per rank, such as 4GiB; default: what is free on a GPU, 1 GiB on the CPU",
        type=byte_count,
    )
    flag("gpu-memory-utilization", "share of the GPU's memory to use", type=float)
    flag("enable-prefix-caching", "share the pages of equal prompt beginnings", action=argparse.BooleanOptionalAction)
    flag(
        "kv-offloading-size",
        "host memory, such as 64GiB, for pages and states that others drive out, copied back where they are wanted: "
        "of each replica, divided among its ranks; default: none",
        type=byte_count,
    )
    flag(
        "state-dtype",
        "type of the states that layers carry; auto: float32; 16 bits: half the memory and less exact",
        choices=get_args(StateDType),
    )
    flag(
        "quantization",
        "fp8: round plain weights to 8 bits while they are read: half the memory, less exact; auto: as they are",
        choices=get_args(Quantization),
    )
    flag(
        "activation-dtype",
        "fp8: steps of many rows multiply weights in FP8 by rows in 8 bits: faster and less exact; auto: as they are",
        choices=get_args(ActivationDType),
    )
    flag(
        "kept-states",
        "copies of states that later prompts may begin from; only for models that carry a state",
        type=int,
    )
    flag("run-ahead", "plans in flight", type=int)
    flag("max-lease", "most decode steps granted by one plan", type=int)
    flag("max-lease-ms", "of slow steps, no more than take about this long, but one", type=float)
    flag("deterministic", "batch invariance on a GPU, to the bit", action=argparse.BooleanOptionalAction)
    flag(
        "speculative-config",
        "try tokens that may come next: JSON such as "
        '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 1}, or by the '
        'model\'s own layer: {"method": "mtp", "num_speculative_tokens": 2}, or by another one: "eagle3", with "model"',
        type=json_map,
        metavar="JSON",
    )
    flag("enforce-eager", "no CUDA graphs", action=argparse.BooleanOptionalAction)
    flag(
        "allow-changes",
        "clients may put the engine to sleep and wake it up, and exchange its weights",
        action=argparse.BooleanOptionalAction,
    )
    flag(
        "keep-cores-awake",
        "while a first token, or few of a grammar, are awaited, by processes of the idle class; "
        "default: on a GPU, if no quota counts them",
        action=argparse.BooleanOptionalAction,
    )
    flag("max-queued-requests", "requests that may wait for a slot; more are refused as overloaded", type=int)
    flag("max-queued-tokens", "tokens that the waiting requests may bring", type=int)
    flag(
        "tool-call-parser",
        "how the model writes tool calls; auto: as its chat template shows; "
        "mistral, deepseek: it shows which of both ways",
        choices=get_args(ToolCallParser),
    )
    flag(
        "reasoning-parser",
        "think: reasoning stands between <think> and </think>; auto: as its chat template shows",
        choices=get_args(ReasoningParser),
    )
    flag("log-requests", "the HTTP door writes a line for each request", action=argparse.BooleanOptionalAction)
    flag(
        "take-over",
        "load everything, then wait for the engine that has the addresses to leave them",
        action=argparse.BooleanOptionalAction,
    )
    flag("startup-timeout", "seconds until the engine must be ready", type=float)
    flag("trace-dir", "folder where each process records what it did when, to be read by scripts/bench.py trace")
    flag("drain-timeout", "seconds that running requests get after SIGTERM", type=float)
    flag("heartbeat-timeout", "seconds of silence after which a process is killed and started again", type=float)
    flag("max-restarts", "deaths of one process within the window that are made good", type=int)
    flag("restart-window", "seconds in which such deaths are counted", type=float)


def engine_config(model: str, arguments: argparse.Namespace, **more: object) -> EngineConfig:
    """The config from what was given; raises ValueError naming the flag that is wrong."""
    return EngineConfig(model=model, **{**given_flags(arguments), **more})


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's flags that were given, by their fields' names."""
    names = (f.name for f in _fields() if f.name != "model")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(EngineConfig)
