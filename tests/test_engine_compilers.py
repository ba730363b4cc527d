"""Kernels are compiled ahead of the first launch, by processes that share the work; nothing depends on them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from checkpoints import checkpoint
from tercet.engine.compiler_process import CompilerSpec, steps_of
from tercet.engine.compilers import start_compilers
from tercet.engine.config import EngineConfig
from tercet.model import compile_ahead as module
from tercet.model.compile_ahead import compile_ahead, fingerprint
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, gpu_name, is_hopper, multiprocessors, use_kernels

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")
GPU = Gpu("NVIDIA H200", 90, 132)
FEW = {"device": "cuda", "max_num_seqs": 1, "max_num_batched_tokens": 64, "load_format": "dummy"}


def config_of(family: str, **changes: object) -> EngineConfig:
    return EngineConfig(model=str(checkpoint(family)), **{**FEW, **changes})  # type: ignore[arg-type]


def spec_of(config: EngineConfig) -> CompilerSpec:
    return CompilerSpec(
        config=config, model_path=config.model, gpu=GPU.name, capability=GPU.capability, multiprocessors=132
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_tensors_without_memory_are_on_the_gpu_that_is_compiled_for() -> None:
    meta = torch.device("meta")
    x = torch.empty(1, device=meta)
    assert not use_kernels(x)
    for gpu, hopper in ((90, True), (80, False), (Gpu("NVIDIA H200", 90, 114), True)):
        with compiling_for(gpu):
            assert use_kernels(x)
            assert is_hopper(meta) == hopper
            assert gpu_name(meta) == ("" if isinstance(gpu, int) else gpu.name)
            assert multiprocessors(meta) == {90: 132, 80: 108}.get(gpu if isinstance(gpu, int) else 0, 114)
            assert not use_kernels(torch.empty(1))
    assert not is_hopper(meta)


@pytest.mark.parametrize("size", [1, 2])
def test_parts_are_the_whole(size: int, cache: Path) -> None:
    config = config_of("qwen3", tensor_parallel_size=size)
    steps = steps_of(config, config.model)
    whole = compile_ahead(steps, GPU, (0, 1))
    assert whole > 20
    parts = [compile_ahead(steps, GPU, (number, 3)) for number in range(3)]
    assert sum(parts) == whole
    assert min(parts) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_over_ranks_are_among_them(dtype: str, cache: Path) -> None:
    """Of few rows, of more, and of long steps."""
    config = config_of("qwen3", tensor_parallel_size=2, max_num_batched_tokens=4096, dtype=dtype)
    steps = steps_of(config, config.model)
    names: list[set[str]] = []
    hashes: list[set[str]] = []
    for rank in range(2):
        with torch.inference_mode(), compiling_for(GPU, (0, 1)) as kernels:
            module.launch_all(steps, rank)
        names.append({kernel.name for kernel in kernels})
        hashes.append({kernel.hash for kernel in kernels})
    assert names[0] == names[1]
    wanted = {"_all_reduce_add_rms_norm_kernel", "_all_reduce_rows_add_rms_norm_kernel", "_add_arrived_kernel"}
    assert wanted <= names[0], names[0]
    assert hashes[0] != hashes[1]


def test_what_decides_which_kernels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    config, changes = config_of("qwen3"), ({"deterministic": True}, {"page_size": 32})
    prints = {
        fingerprint(steps_of(one, one.model), gpu)
        for one in (config, config_of("llama"), *(config_of("qwen3", **change) for change in changes))
        for gpu in (GPU, Gpu("NVIDIA H200", 90, 114))
    }
    assert len(prints) == 4 * 2
    assert fingerprint(steps_of(config, config.model), GPU) in prints
    monkeypatch.setattr(module.triton, "__version__", "0")
    assert fingerprint(steps_of(config, config.model), GPU) not in prints


def test_the_second_start_does_without(cache: Path) -> None:
    spec, told = spec_of(config_of("qwen3")), list[tuple[int, int]]()
    compilers = start_compilers(spec, cache, "f")
    assert compilers is not None
    compilers.wait(lambda done, of: told.append((done, of)))
    assert told == [(done, told[0][1]) for done in range(told[0][1] + 1)]
    assert len(list(cache.rglob("*.cubin"))) > 20
    assert start_compilers(spec, cache, "f") is None
    assert start_compilers(spec, cache, "g") is not None


def test_a_failure_is_nobody_s(cache: Path) -> None:
    config = config_of("qwen3")
    compilers = start_compilers(spec_of(EngineConfig(model=f"{config.model} is not there")), cache, "f")
    assert compilers is not None
    compilers.wait(lambda done, of: None)
    assert start_compilers(spec_of(config), cache, "f") is not None  # it is tried again


def test_they_end_with_who_started_them(cache: Path) -> None:
    spec = msgspec.json.encode(spec_of(config_of("qwen3", max_num_batched_tokens=4096)))
    program = f"""
from pathlib import Path
import time
import msgspec
from tercet.engine.compiler_process import CompilerSpec
from tercet.engine.compilers import start_compilers
compilers = start_compilers(msgspec.json.decode({spec!r}, type=CompilerSpec), Path({str(cache)!r}), "f")
print("started", flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    compilers = psutil.Process(worker.pid).children()
    assert 1 <= len(compilers) <= len(os.sched_getaffinity(0))
    time.sleep(1)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert not psutil.wait_procs(compilers, 5)[1]
