"""Copies of pages and states beside steps: where they lie, and on a GPU who waits for whom, and for nobody else."""

import functools
from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tercet.model.swaps
from checkpoints import checkpoint
from launched_kernels import launched_kernels
from tercet.ipc.step_messages import Step
from tercet.ipc.swap_messages import Swap
from tercet.model.checkpoint import read_config
from tercet.model.host_memory import HostMemory
from tercet.model.host_places import HostPlaces, divide
from tercet.model.kv_cache import KvCache, make_kv_cache
from tercet.model.parallel import Group
from tercet.model.states import States, make_states
from tercet.model.swaps import Swaps, _Made

PAGE = 16
NUM_PAGES = 12
CONFIG = read_config(checkpoint("qwen3"))
CARRYING = read_config(checkpoint("qwen3.5"))
PAGE_BYTES = CONFIG.kv_bytes_per_page(PAGE, torch.float32, 1)


def step(step_id: int, swapped: int = 0, epoch: int = 0) -> Step:
    return Step(step_id, 1, b"", (), b"", b"", b"", epoch, swapped=swapped)


def packed(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


@functools.cache
def host_memory(device: torch.device, num_places: int) -> HostMemory:
    """What is pinned stays so."""
    return HostMemory(num_places * PAGE_BYTES + 100, device)


def of_device(device: torch.device, num_places: int = 6) -> tuple[KvCache, HostPlaces]:
    """A cache, and places in the host's memory."""
    cache = make_kv_cache(CONFIG, NUM_PAGES, PAGE, torch.float32, device, 1)
    return cache, divide(host_memory(device, num_places), cache, None, Group.single(device))


def test_places_for_pages() -> None:
    cache, host = of_device(torch.device("cpu"), 5)  # which nobody else has
    (pages,), (block,) = host.pages, cache.blocks
    assert pages.shape == (5, *block.shape[:2], *block.shape[3:])
    assert pages.is_contiguous()
    assert not pages.any()
    assert (host.num_pages, host.page_bytes, host.num_states, host.state_bytes) == (5, PAGE_BYTES, 0, 0)


def test_too_little_for_one() -> None:
    device = torch.device("cpu")
    cache, states = of_states(device)
    page_bytes = cache.blocks[0][:, :, 0].nbytes
    for memory, carried, said in (
        (page_bytes - 1, None, r"a page of 16 tokens takes [0-9.]+ KiB: want room"),
        (
            states.nbytes // 6 + page_bytes - 1,
            states,
            r"a page of 16 tokens takes [0-9.]+ KiB and a state [0-9.]+ KiB: want room",
        ),
    ):
        with pytest.raises(ValueError, match=rf"--kv-offloading-size takes .* for each rank, and {said}"):
            divide(HostMemory(memory, device), cache, carried, Group.single(device))


def of_states(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[KvCache, States]:
    """A cache, and six places of states with whatever bits, as far as they are numbers."""
    cache = make_kv_cache(CARRYING, NUM_PAGES, PAGE, dtype, device, 1)
    states = make_states(CARRYING, 6, dtype, device, 1)
    assert states is not None
    for tensor in (cache.blocks[0], states.tails_LSTC, states.states_LSHDV):
        tensor.copy_(torch.randn(tensor.shape))
    return cache, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_states", [1, 2, 5])
def test_places_for_states(num_states: int, dtype: torch.dtype) -> None:
    """One for the pages of each 4,096 tokens, and none lies over another."""
    cache, states = of_states(torch.device("cpu"), dtype)
    state_bytes, page_bytes = states.nbytes // 6, cache.blocks[0][:, :, 0].nbytes
    memory = HostMemory(num_states * (256 * page_bytes + state_bytes) + 2 * page_bytes + 3, torch.device("cpu"))
    host = divide(memory, cache, states, Group.single(torch.device("cpu")))
    assert (host.num_pages, host.page_bytes) == (256 * num_states + 2, page_bytes)
    assert (host.num_states, host.state_bytes) == (num_states, state_bytes)
    assert host.tails is not None
    assert host.states is not None
    for value, places in enumerate((host.pages[0], host.tails, host.states)):
        assert places.is_contiguous()
        places.fill_(value + 1)
    assert all(
        set(places.unique().tolist()) == {n + 1.0} for n, places in enumerate((host.pages[0], host.tails, host.states))
    )


def test_room_for_one_state_and_few_pages() -> None:
    cache, states = of_states(torch.device("cpu"))
    memory = HostMemory(states.nbytes // 6 + 3 * cache.blocks[0][:, :, 0].nbytes, torch.device("cpu"))
    host = divide(memory, cache, states, Group.single(torch.device("cpu")))
    assert (host.num_pages, host.num_states) == (3, 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("at_a_time", [1, 2**23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_there_and_back(
    dtype: torch.dtype, at_a_time: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whatever they hold, beside pages or alone; no other number changes there or here."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(tercet.model.swaps, "_AT_A_TIME", at_a_time)
    where = torch.device(device, 0 if device == "cuda" else None)
    cache, states = of_states(where, dtype)
    states.states_LSHDV[:, 5] = float("nan")
    host = divide(host_memory(where, 1000), cache, states, Group.single(where))
    assert host.num_states > 2
    assert host.tails is not None
    assert host.states is not None
    pools, there = (states.tails_LSTC, states.states_LSHDV), (host.tails, host.states)
    swaps, (block,) = Swaps(cache, host, 2, states), cache.blocks
    before = [pool.clone() for pool in pools]
    if device == "cuda":
        torch.cuda.synchronize()  # no step is said to be complete
    host_before = [places.clone() for places in there]
    swaps.make(Swap(1, 0, -1, stores=packed(3, 5), stored_states=packed(4, 1, 5, 2))).wait()
    assert torch.equal(host.pages[0][5], block[:, :, 3].cpu())
    for pool, places, old, host_old in zip(pools, there, before, host_before, strict=True):
        assert same(pool, old)
        host_old[1], host_old[2] = old[:, 4].cpu(), old[:, 5].cpu()
        assert same(places, host_old)
    swaps.make(Swap(2, 0, -1, loaded_states=packed(2, 0))).wait()
    swaps.make(Swap(3, 0, -1, loads=packed(5, 7), loaded_states=packed(1, 3))).wait()
    assert torch.equal(block[:, :, 7], block[:, :, 3])
    for pool, places, old, host_old in zip(pools, there, before, host_before, strict=True):
        old[:, 0], old[:, 3] = old[:, 5].clone(), old[:, 4].clone()
        assert same(pool, old)
        assert same(places, host_old)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_more_than_any_system_has() -> None:
    with pytest.raises(ValueError, match=r"--kv-offloading-size takes .* GiB .*: Cannot allocate memory; want less"):
        HostMemory(2**55, torch.device("cpu"))


def test_on_the_cpu_they_are_made_at_once() -> None:
    kv_cache, host = of_device(torch.device("cpu"))
    swaps = Swaps(kv_cache, host, 2)
    (cache,), (pages,) = kv_cache.blocks, host.pages
    cache.copy_(torch.randn(cache.shape))
    before = cache.clone()
    swaps.precede(step(0))
    swaps.follow(step(0))
    swaps.make(Swap(1, 0, 0, stores=packed(3, 5, 4, 0))).wait()
    assert torch.equal(pages[5], before[:, :, 3])
    assert torch.equal(pages[0], before[:, :, 4])
    swaps.make(Swap(2, 0, 0, loads=packed(5, 7))).wait()
    before[:, :, 7] = before[:, :, 3]
    assert torch.equal(cache, before)
    swaps.precede(step(1, swapped=2, epoch=1))


def test_what_layers_borrow_is_there_once() -> None:
    config = read_config(checkpoint("gemma4-told"))
    cache = make_kv_cache(config, NUM_PAGES, PAGE, torch.float32, torch.device("cpu"), 1)
    assert config.cache_places == [0, 1, 2, 1, 2, 1]
    assert [layer.data_ptr() for layer in cache.layers[3:]] == [cache.layers[n].data_ptr() for n in (1, 2, 1)]
    assert sum(block.shape[0] for block in cache.blocks) == 3
    assert sum(block.nbytes for block in cache.blocks) == NUM_PAGES * config.kv_bytes_per_page(PAGE, torch.float32, 1)


def test_layers_that_hold_other_numbers_come_back_too() -> None:
    device = torch.device("cpu")
    cache = make_kv_cache(read_config(checkpoint("gemma4")), NUM_PAGES, PAGE, torch.float32, device, 1)
    page_bytes = sum(block[:, :, 0].nbytes for block in cache.blocks)
    host = divide(HostMemory(6 * page_bytes + 100, device), cache, None, Group.single(device))
    assert [layer.shape[2:] for layer in cache.layers] == [(2, PAGE, 24), (1, PAGE, 40)] * 2
    assert (len(cache.blocks), host.num_pages, host.page_bytes) == (2, 6, page_bytes)
    for number, layer in enumerate(cache.layers):
        layer.copy_(torch.randn(layer.shape) + 10 * number)
    before = [layer.clone() for layer in cache.layers]
    swaps = Swaps(cache, host, 2)
    swaps.make(Swap(1, 0, 0, stores=packed(3, 5, 4, 0))).wait()
    swaps.make(Swap(2, 0, 0, loads=packed(5, 7, 0, 2))).wait()
    for layer, old in zip(cache.layers, before, strict=True):
        old[:, 7], old[:, 2] = old[:, 3], old[:, 4]
        assert torch.equal(layer, old)


class OnGpu:
    """Streams that are kept busy."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        cache, places = of_device(self.device)
        (self.cache,), (self.host,) = cache.blocks, places.pages
        self.swaps = Swaps(cache, places, 2)
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
