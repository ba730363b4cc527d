"""Copies of pages beside steps: where they lie, and on a GPU who waits for whom, and for nobody else."""

import functools
from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from checkpoints import checkpoint
from launched_kernels import launched_kernels
from tercet.ipc.step_messages import Step
from tercet.ipc.swap_messages import Swap
from tercet.model.checkpoint import read_config
from tercet.model.host_memory import HostMemory
from tercet.model.kv_cache import make_kv_cache
from tercet.model.parallel import Group
from tercet.model.swaps import Swaps, _Made

PAGE = 16
NUM_PAGES = 12
CONFIG = read_config(checkpoint("qwen3"))
PAGE_BYTES = CONFIG.kv_bytes_per_page(PAGE, torch.float32, 1)


def step(step_id: int, swapped: int = 0, epoch: int = 0) -> Step:
    return Step(step_id, 1, b"", (), b"", b"", b"", epoch, swapped=swapped)


def packed(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


@functools.cache
def host_memory(device: torch.device, num_places: int) -> HostMemory:
    """What is pinned stays so."""
    return HostMemory(num_places * PAGE_BYTES + 100, device)


def of_device(device: torch.device, num_places: int = 6) -> tuple[Tensor, Tensor]:
    """A cache, and places in the host's memory."""
    memory = host_memory(device, num_places)
    cache = make_kv_cache(CONFIG, NUM_PAGES, PAGE, torch.float32, device, 1)
    return cache, memory.pages(CONFIG, PAGE, torch.float32, Group.single(device))


def test_places_for_pages() -> None:
    cache, host = of_device(torch.device("cpu"), 5)  # which nobody else has
    assert host.shape == (5, *cache.shape[:2], *cache.shape[3:])
    assert host.is_contiguous()
    assert not host.any()


def test_too_little_for_one() -> None:
    memory = HostMemory(PAGE_BYTES - 1, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"--kv-offloading-size takes .* for each rank, and a page of 16 tokens"):
        memory.pages(CONFIG, PAGE, torch.float32, Group.single(torch.device("cpu")))


def test_more_than_any_system_has() -> None:
    with pytest.raises(ValueError, match=r"--kv-offloading-size takes .* GiB .*: Cannot allocate memory; want less"):
        HostMemory(2**55, torch.device("cpu"))


def test_on_the_cpu_they_are_made_at_once() -> None:
    cache, host = of_device(torch.device("cpu"))
    swaps = Swaps(cache, host, 2)
    cache.copy_(torch.randn(cache.shape))
    before = cache.clone()
    swaps.precede(step(0))
    swaps.follow(step(0))
    swaps.make(Swap(1, 0, 0, stores=packed(3, 5, 4, 0))).wait()
    assert torch.equal(host[5], before[:, :, 3])
    assert torch.equal(host[0], before[:, :, 4])
    swaps.make(Swap(2, 0, 0, loads=packed(5, 7))).wait()
    before[:, :, 7] = before[:, :, 3]
    assert torch.equal(cache, before)
    swaps.precede(step(1, swapped=2, epoch=1))


class OnGpu:
    """Streams that are kept busy."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.cache, self.host = of_device(self.device)
        self.swaps = Swaps(self.cache, self.host, 2)
        self.all_of(0)  # loads its kernels, for which the GPU has to be at rest

    def fill(self, page: int, value: float, *, late: bool = False) -> None:
        """On the current stream, which comes to it after a while."""
        if late:
            torch.cuda._sleep(100_000_000)
        self.cache[:, :, page] = value

    def all_of(self, page: int) -> set[float]:
        """As the current stream finds it."""
        return set(self.cache[:, :, page].flatten().cpu().tolist())


@pytest.fixture
def on_gpu() -> Iterator[OnGpu]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield OnGpu()
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_swap_is_behind_its_step_and_no_other(on_gpu: OnGpu) -> None:
    swaps = on_gpu.swaps
    on_gpu.fill(1, 1.0, late=True)
    swaps.follow(step(0))
    on_gpu.fill(1, 2.0, late=True)
    swaps.follow(step(1))
    made = swaps.make(Swap(1, 0, 0, stores=packed(1, 3)))
    made.wait()
    assert not torch.cuda.current_stream().query(), "it has waited for what was launched later"
    assert set(on_gpu.host[3].flatten().tolist()) == {1.0}
    torch.cuda.synchronize()
    swaps.make(Swap(2, 0, 1, stores=packed(1, 4))).wait()
    assert set(on_gpu.host[4].flatten().tolist()) == {2.0}


@pytest.mark.gpu
def test_a_step_is_behind_its_swaps_and_no_other(on_gpu: OnGpu) -> None:
    swaps = on_gpu.swaps
    on_gpu.host.fill_(7.0)
    with torch.cuda.stream(swaps._stream):
        torch.cuda._sleep(100_000_000)
    assert isinstance(first := swaps.make(Swap(1, 0, -1, loads=packed(2, 5))), _Made)
    assert first.done  # they are begun
    with torch.cuda.stream(swaps._stream):
        torch.cuda._sleep(1_000_000_000)
    last = swaps.make(Swap(2, 0, -1, loads=packed(2, 6)))
    swaps.precede(step(0))
    assert on_gpu.all_of(5) == {0.0}  # whoever looks too early finds nothing
    swaps.precede(step(1, swapped=1))
    assert on_gpu.all_of(5) == {7.0}
    assert on_gpu.all_of(6) == {0.0}
    swaps.precede(step(2, swapped=2))
    assert on_gpu.all_of(6) == {7.0}
    last.wait()


@pytest.mark.gpu
def test_a_new_scheduler_s_steps_are_behind_all_of_the_last_one_s(on_gpu: OnGpu) -> None:
    swaps = on_gpu.swaps
    on_gpu.host.fill_(7.0)
    with torch.cuda.stream(swaps._stream):
        torch.cuda._sleep(100_000_000)
    swaps.make(Swap(1, 0, -1, loads=packed(2, 5)))
    swaps.precede(step(0, epoch=1))
    on_gpu.fill(5, 3.0)
    torch.cuda.synchronize()
    assert on_gpu.all_of(5) == {3.0}
    swaps.make(Swap(1, 1, -1, loads=packed(2, 5)))
    swaps.precede(step(1, swapped=1, epoch=1))
    assert on_gpu.all_of(5) == {7.0}


@pytest.mark.gpu
def test_no_kernel_runs_and_what_is_made_is_forgotten(on_gpu: OnGpu) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for number in range(1, 50):
            on_gpu.swaps.make(Swap(number, 0, -1, stores=packed(1, 3, 2, 4))).wait()
    assert len(on_gpu.swaps._made) <= 2
    names = launched_kernels(profiler)
    assert names
    assert all(name.startswith("Memcpy") for name in names), "multiprocessors are for steps"
