"""PROCESS compiler: compiles some of the kernels that an engine on a GPU is going to launch, and ends.

A worker starts several (`compilers.py`) when nobody has yet on this machine: one after the other, the same kernels take
it a minute. Reads what to compile from its standard input; what it makes is in Triton's cache.
"""

import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from tercet.engine.child import die_with_parent, ignore_group_signals
from tercet.engine.config import EngineConfig

if TYPE_CHECKING:  # torch takes seconds, and who only names the spec has no use for it
    import torch

    from tercet.model.compile_ahead import Steps
    from tercet.model.load import Opened

_NICENESS = 10
"""The worker, which reads weights meanwhile, goes first."""


class CompilerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to compile, and for which GPU."""

    config: EngineConfig
    model_path: str
    gpu: str
    capability: int
    multiprocessors: int


def steps_of(config: EngineConfig, opened: "Opened") -> "Steps":
    """What the steps of an engine with this model depend on."""
    from tercet.model.compile_ahead import Steps
    from tercet.model.landings import num_landings

    return Steps(
        config=opened.config,
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=opened.dtype,
        max_model_len=opened.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        page_size=config.page_size,
        deterministic=config.deterministic,
        num_landings=num_landings(config.run_ahead, config.max_lease),
    )


def open_configured(config: EngineConfig, model_path: str, device: "torch.device") -> "Opened":
    """An engine's model, for a rank's device or, to compile for it, the meta device. ValueError as `open_for` says."""
    from tercet.model.load import open_for

    return open_for(
        Path(model_path),
        device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
    )


def main(specs: IO[bytes], claims: Path) -> None:
    """`claims`: a folder in which compilers note what each of them does."""
    spec = msgspec.json.decode(specs.readline(), type=CompilerSpec)
    import torch

    from tercet.model.compile_ahead import Claims, compile_ahead
    from tercet.triton_kernels.dispatch import Gpu

    opened = open_configured(spec.config, spec.model_path, torch.device("meta"))
    gpu = Gpu(spec.gpu, spec.capability, spec.multiprocessors)
    compile_ahead(steps_of(spec.config, opened), gpu, Claims(claims))


if __name__ == "__main__":
    ignore_group_signals()
    die_with_parent()
    os.nice(_NICENESS)
    main(sys.stdin.buffer, Path(sys.argv[1]))
