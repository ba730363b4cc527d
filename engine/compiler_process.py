"""PROCESS compiler: compiles the kernels that an engine on a GPU is going to launch, and ends.

A worker starts it (`compilers.py`) when nobody has yet on this machine: one after the other, the same kernels take a
minute. So it reads torch and Triton once and is then as many processes as it is told to be. Reads what to compile from
its standard input, says on its standard output how each of them ended; what they make is in Triton's cache.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from tercet.engine.child import Paths, die_with_parent, ignore_group_signals
from tercet.engine.config import EngineConfig
from tercet.engine.image_rules import load_image_rules

if TYPE_CHECKING:  # torch takes seconds, and who only names the spec has no use for it
    import torch

    from tercet.model.cache_tables import CacheTables
    from tercet.model.compile_ahead import Steps
    from tercet.model.load import Opened
    from tercet.model.runner_settings import GuessSettings
    from tercet.triton_kernels.dispatch import Gpu

DONE, FAILED = b".", b"x"
_NICENESS = 10
"""The worker, which reads weights meanwhile, goes first."""


class CompilerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to compile, and for which GPU."""

    config: EngineConfig
    paths: Paths
    gpu: str
    capability: int
    multiprocessors: int


def steps_of(config: EngineConfig, paths: Paths, opened: "Opened") -> "Steps":
    """What the steps of an engine with this model depend on."""
    from tercet.model.compile_ahead import Steps
    from tercet.model.landings import num_landings

    return Steps(
        config=opened.config,
        tables=tables_of(config, opened),
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=opened.dtype,
        cache_dtype=opened.cache_dtype,
        max_model_len=opened.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        page_size=config.page_size,
        deterministic=config.deterministic,
        guesses=guess_settings(config),
        eagle=None if opened.eagle is None else opened.eagle.config,
        adapters=opened.ranks,
        kept=opened.kept,
        rounds_rows=opened.rounds_rows,
        vision=None if opened.vision is None else opened.vision.config,
        most_image_tokens=0 if opened.vision is None else most_image_tokens(config, paths, opened.max_model_len),
        num_landings=num_landings(config.run_ahead, config.max_lease),
    )


def tables_of(config: EngineConfig, opened: "Opened") -> "CacheTables":
    """By which layers find their keys and values: all by one, where pages have a copy in the host's memory."""
    from tercet.model.cache_tables import cache_tables, one_table

    if config.kv_offloading_size:
        return one_table(opened.config)
    return cache_tables(opened.config, opened.max_model_len)


def guess_settings(config: EngineConfig) -> "GuessSettings | None":
    """How far an engine's runners try what may come next."""
    from tercet.model.runner_settings import GuessSettings

    if (asked := config.speculative_config) is None:
        return None
    return GuessSettings(
        num_guesses=asked.num_speculative_tokens,
        looked_up=asked.looked_up,
        most_slots=min(asked.disable_by_batch_size, config.max_num_seqs),
    )


def open_configured(config: EngineConfig, paths: Paths, device: "torch.device") -> "Opened":
    """An engine's model, with what goes with it, for a rank's device or, to compile for it, the meta device.

    ValueError as `open_for` says.
    """
    from tercet.model.adapter_places import Reserved
    from tercet.model.load import open_for

    return open_for(
        Path(paths.weights or paths.model),
        device,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        state_dtype=config.state_dtype,
        quantization=config.quantization,
        activation_dtype=config.activation_dtype,
        max_model_len=config.max_model_len,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        tensor_parallel_size=config.tensor_parallel_size,
        adapters=[None if path is None else Path(path) for path in paths.adapters],
        reserved=Reserved(config.max_adapters, config.max_adapter_rank) if config.max_adapters else None,
        label_tokens=config.classifier_tokens,
        guesses=config.speculative_config is not None and config.speculative_config.method == "mtp",
        eagle=None if paths.guesser is None else Path(paths.guesser),
        like=None if paths.weights is None else Path(paths.model),
        sees=config.sees,
    )


def most_image_tokens(config: EngineConfig, paths: Paths, max_model_len: int) -> int:
    """Of an image, in an engine whose model sees."""
    rules = load_image_rules(Path(paths.model), config)
    assert rules is not None
    return min(rules.most_seen, max_model_len - 1)


def steps_of_spec(spec: CompilerSpec) -> "tuple[Steps, Gpu]":
    """And the GPU, on which what is kept as stored depends."""
    import torch

    from tercet.triton_kernels.dispatch import Gpu, pretending

    gpu = Gpu(spec.gpu, spec.capability, spec.multiprocessors)
    with pretending(gpu):
        opened = open_configured(spec.config, spec.paths, torch.device("meta"))
        return steps_of(spec.config, spec.paths, opened), gpu


def main(specs: IO[bytes], reports: IO[bytes], claims: Path, num_processes: int) -> None:
    """`claims`: a folder in which processes note what each of them does. Reports are one of two bytes a process."""
    spec = msgspec.json.decode(specs.readline(), type=CompilerSpec)
    from tercet.model.quick_sources import quicken_sources

    quicken_sources()
    from tercet.model.compile_ahead import Claims, compile_ahead
    from tercet.model.early_work import fingerprint_triton

    steps, gpu = steps_of_spec(spec)
    fingerprint_triton()
    gc.freeze()  # a collection would touch, and so copy, what the processes share
    pids = [_forked(lambda: compile_ahead(steps, gpu, Claims(claims))) for _ in range(num_processes)]
    for _ in pids:
        _, status = os.wait()
        reports.write(FAILED if status else DONE)
        reports.flush()


def _forked(work: Callable[[], object]) -> int:
    """The process id of a copy of this process that does the work and ends."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        die_with_parent()
        if os.getppid() == parent:  # else it died before that was said
            work()
            status = 0
    except Exception:  # noqa: BLE001  its status says what became of it
        traceback.print_exc()
    finally:
        os._exit(status)  # nothing that the parent was about to do is this process's to do


if __name__ == "__main__":
    ignore_group_signals()
    die_with_parent()
    os.nice(_NICENESS)
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no report
    main(sys.stdin.buffer, pipe, Path(sys.argv[1]), int(sys.argv[2]))
