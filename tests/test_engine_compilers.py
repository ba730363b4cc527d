"""The processes that compile kernels ahead of a first start: they share the work, and nothing depends on them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from checkpoints import checkpoint
from shapes import write_shape
from tercet.engine.child import Paths
from tercet.engine.compiler_process import CompilerSpec, steps_of_spec
from tercet.engine.compilers import Compilers, OthersCompilers, start_compilers
from tercet.engine.config import EngineConfig

FEW = {"device": "cuda", "max_num_seqs": 1, "max_num_batched_tokens": 64, "load_format": "dummy", "dtype": "bfloat16"}


def config_of(family: str, **changes: object) -> EngineConfig:
    return EngineConfig(**{"model": str(checkpoint(family)), **FEW, **changes})  # type: ignore[arg-type]


def spec_of(config: EngineConfig) -> CompilerSpec:
    return CompilerSpec(config=config, paths=Paths(config.model), gpu="NVIDIA H200", capability=90, multiprocessors=132)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.long
def test_each_start_compiles_until_one_has_been_through(cache: Path) -> None:
    """A failure is nobody's, and does not count."""
    config = config_of("qwen3")
    failing = start_compilers(spec_of(EngineConfig(model=f"{config.model} is not there")), cache, "f")
    assert failing is not None
    failing.wait(lambda done, of: None)
    spec, told = spec_of(config), list[tuple[int, int]]()
    compilers = start_compilers(spec, cache, "f")
    assert compilers is not None
    compilers.wait(lambda done, of: told.append((done, of)))
    assert told == [(done, told[0][1]) for done in range(told[0][1] + 1)]
    assert len(list(cache.rglob("*.cubin"))) > 20
    assert start_compilers(spec, cache, "f") is None
    other = start_compilers(spec, cache, "g")
    assert other is not None
    other.wait(lambda done, of: None)


@pytest.mark.long
def test_they_end_with_who_started_them(cache: Path) -> None:
    spec = msgspec.json.encode(spec_of(config_of("qwen3", max_num_batched_tokens=4096)))
    program = f"""
from pathlib import Path
import time
import msgspec
from tercet.engine.compiler_process import CompilerSpec, steps_of_spec
from tercet.engine.compilers import start_compilers
compilers = start_compilers(msgspec.json.decode({spec!r}, type=CompilerSpec), Path({str(cache)!r}), "f")
print("started", flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    (first,) = psutil.Process(worker.pid).children()
    deadline = time.monotonic() + 30
    while not first.children():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    compilers = [first, *first.children()]
    assert len(compilers) <= 1 + len(os.sched_getaffinity(0))
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert not psutil.wait_procs(compilers, 5)[1]


@pytest.mark.parametrize(
    ("shape", "capability", "changes", "bits"),
    [
        ("qwen3-8b-fp8", 80, {}, None),
        ("qwen3-8b-fp8", 89, {}, 8),
        ("qwen3-8b-fp8", 90, {}, 8),
        ("qwen3-8b-fp8", 89, {"deterministic": True}, 8),
        ("qwen3-8b-fp8", 90, {"dtype": "float32"}, None),
        ("qwen3-8b-fp8", 90, {"tensor_parallel_size": 2}, 8),
        ("qwen3-8b-fp8", 90, {"tensor_parallel_size": 8}, None),
        ("qwen3-8b-awq", 80, {}, 4),
        ("qwen3-8b-awq", 80, {"dtype": "bfloat16"}, 4),
    ],
)
def test_they_compile_for_weights_as_the_worker_has_them(
    shape: str, capability: int, changes: dict[str, object], bits: int | None, tmp_path: Path
) -> None:
    """In FP8, of four bits, or expanded, as the engine's configuration and its GPU have it."""
    config = config_of("qwen3", model=str(write_shape(shape, tmp_path)), **changes)
    steps, gpu = steps_of_spec(msgspec.structs.replace(spec_of(config), capability=capability))
    assert gpu.capability == capability
    assert [(way.bits, way.group) for way in steps.kept.values()] == ([(bits, 128)] * 7 * 36 if bits else [])


@pytest.mark.long
def test_of_those_that_want_the_same_one_compiles(cache: Path) -> None:
    """As soon as that is through, or dead, the others go on; and who comes then has nothing to do."""
    failing, told = spec_of(EngineConfig(model="not there")), list[tuple[int, int]]()
    first, second = (start_compilers(failing, cache, "f") for _ in range(2))
    assert isinstance(first, Compilers)
    assert isinstance(second, OthersCompilers)
    assert isinstance(start_compilers(failing, cache, "g"), Compilers), "of something else"
    waiting = threading.Thread(target=second.wait, args=(lambda done, of: told.append((done, of)),))
    waiting.start()
    time.sleep(0.2)
    assert told == [(0, 1)]
    first.wait(lambda done, of: None)
    waiting.join(10)
    assert told == [(0, 1), (1, 1)]
    third = start_compilers(failing, cache, "f")
    assert isinstance(third, Compilers), "the first failed"
    third.wait(lambda done, of: None)
    (cache / "tercet-f").touch()
    assert start_compilers(failing, cache, "f") is None
