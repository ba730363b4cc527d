"""Pages get to the host's memory and back to the bit, whatever they hold, and no other number changes there or here."""

import ctypes
import functools
import random

import pytest
import torch
from torch import Tensor

import tercet.model.host_memory
from covering import long
from tercet.model.host_memory import HostMemory
from tercet.model.page_copies import PageCopies, Part, parts_in_pieces
from tercet.triton_kernels.checks import FP8
from test_triton_kernels_copy_pages import bits, random_cache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1, 2, 5, 1, 1, 3), (3, 2, 9, 2, 16, 24), (3, 1, 9, 1, 16, 72), long((36, 2, 12, 8, 64, 128))]
NUM_PLACES = 7
LARGEST_PAGE = 36 * 2 * 8 * 64 * 128 * 4
PIECE = 2**16
"""Bytes: pages of the second shape lie in one pinned piece or in two, those of the last in many."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@functools.cache
def host_memory(device: torch.device) -> HostMemory:
    """As an engine has it, but pinned in smaller pieces. What is pinned stays so: one is for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tercet.model.host_memory, "PIECE", PIECE)
        memory = HostMemory(2 * NUM_PLACES * LARGEST_PAGE, device)
        memory.places((1,), torch.uint8)  # waits until all of it is pinned
    return memory


def random_host(cache: Tensor, *, is_part: bool = False) -> Tensor:
    """All of a place; or the last layers of each, in what does not begin with the memory, as of states."""
    shape = NUM_PLACES, cache.shape[0] + is_part, cache.shape[1], *cache.shape[3:]
    host = host_memory(cache.device).places(shape, cache.dtype, 3 * PIECE // 4 if is_part else 0)
    bits(host).copy_(torch.randint(0, 256, bits(host).shape, dtype=torch.uint8))
    return host[:, int(is_part) :]


def drawn(count: int, *tops: int) -> list[list[int]]:
    return [list(pair) for pair in zip(*(random.sample(range(top), count) for top in tops), strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_part", [False, True], ids=["all", "part"])
def test_there_and_back(is_part: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    cache = random_cache(shape, dtype, str(device))
    host = random_host(cache, is_part=is_part)
    copies = PageCopies(cache, host, PIECE)
    before, host_before = bits(cache).clone(), bits(host).clone()
    pairs = drawn(5, shape[2], len(host))
    copies.store(pairs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(bits(cache), before)
    for page, place in pairs:
        host_before[place] = before[:, :, page].cpu()
    assert torch.equal(bits(host), host_before)

    pairs = drawn(5, len(host), shape[2])
    copies.load(pairs)
    for place, page in pairs:
        before[:, :, page] = host_before[place].to(device)
    assert torch.equal(bits(cache), before)
    assert torch.equal(bits(host), host_before)


@pytest.mark.parametrize("is_part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_addresses(shape: tuple[int, ...], is_part: bool) -> None:
    """Of what a GPU's copy engines would be told, were the cache there."""
    cache = random_cache(shape, torch.float32, "cpu")
    host = random_host(cache, is_part=is_part)
    copies, host_before = PageCopies(cache, host, PIECE), bits(host).clone()
    apart = cache[0, 0].nbytes
    for page, place in drawn(5, shape[2], len(host)):
        for on_device, on_host, width, num_lines in copies._parts(page, place):
            for line in range(num_lines):
                ctypes.memmove(on_host + line * width, on_device + line * apart, width)
        host_before[place] = bits(cache)[:, :, page]
    assert torch.equal(bits(host), host_before)


def test_parts_of_a_page() -> None:
    """Each lies in one piece, and together they are the page, in its order."""
    for _ in range(2000):
        width, num_lines, piece = random.randint(1, 40), random.randint(1, 9), random.randint(1, 200)
        start = random.randint(0, 400)
        seen: list[int] = []
        for part in parts_in_pieces(start, num_lines, width, piece):
            assert part.num_lines == 1 or part.width == width
            first = start + part.line * width + part.first
            end = first + (part.num_lines - 1) * width + part.width
            assert first // piece == (end - 1) // piece
            seen += range(first, end)
        assert seen == list(range(start, start + num_lines * width))


def test_a_page_in_one_piece_is_one_copy() -> None:
    assert list(parts_in_pieces(7 * 72 * 100, 72, 100, 2**20)) == [Part(0, 0, 100, 72)]
