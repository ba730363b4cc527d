"""Pages get to the host's memory and back to the bit, whatever they hold, and no other number changes there or here."""

import re

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.swap_pages import load_pages, store_pages
from test_triton_kernels_copy_pages import bits, random_cache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [
    (1, 2, 5, 1, 1, 3),
    (3, 2, 9, 2, 16, 24),
    (2, 2, 12, 3, 64, 96),
    (3, 1, 9, 1, 16, 72),
    (36, 2, 12, 8, 64, 128),
]
"""A page's run is a part of a tile, one, and several and a part; the last is that of a real model, for GPUs."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


def random_host(cache: Tensor, num_places: int) -> Tensor:
    sizes = num_places, *cache.shape[:2], *cache.shape[3:-1], cache.shape[-1] * cache.itemsize
    host = torch.randint(0, 256, sizes, dtype=torch.uint8).view(cache.dtype)
    return host.pin_memory() if cache.is_cuda else host


def random_pairs(num_pages: int, num_places: int, count: int) -> tuple[list[int], list[int]]:
    return torch.randperm(num_pages)[:count].tolist(), torch.randperm(num_places)[:count].tolist()


def packed(first: list[int], second: list[int], device: str) -> Tensor:
    return torch.tensor([first, second], dtype=torch.int32).T.contiguous().to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    num_programs = 1 + shape[0]  # fewer than there are tiles, or more
    if device == "cpu" and shape[0] > 3:
        pytest.skip("takes long")
    cache = random_cache(shape, dtype, device)
    host = random_host(cache, 7)
    before, host_before = bits(cache).clone(), bits(host).clone()
    pages, places = random_pairs(shape[2], len(host), 4)
    store_pages(cache, host, packed(pages, places, device), num_programs)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(bits(cache), before)
    for page, place in zip(pages, places, strict=True):
        host_before[place] = before[:, :, page]
    assert torch.equal(bits(host), host_before)

    others = torch.randperm(shape[2])[:4].tolist()
    load_pages(cache, host, packed(places, others, device), num_programs)
    for place, page in zip(places, others, strict=True):
        before[:, :, page] = host_before[place]
    assert torch.equal(bits(cache), before)
    assert torch.equal(bits(host), host_before)


def test_nothing_to_copy(device: str) -> None:
    cache = random_cache(SHAPES[1], torch.float32, device)
    host = random_host(cache, 2)
    before, host_before = bits(cache).clone(), bits(host).clone()
    nothing = torch.empty(0, 2, dtype=torch.int32, device=device)
    store_pages(cache, host, nothing)
    load_pages(cache, host, nothing)
    assert torch.equal(bits(cache), before)
    assert torch.equal(bits(host), host_before)


@pytest.mark.parametrize(
    ("cache", "host", "pairs", "message"),
    [
        ((1, 3, 4, 1, 2, 2), (5, 1, 3, 1, 2, 2), (1, 2), "kv_cache: got shape [1, 3, 4, 1, 2, 2]"),
        ((1, 2, 4, 1, 2, 2), (5, 1, 2, 1, 4, 2), (1, 2), "host_pages: got shape [5, 1, 2, 1, 4, 2], wanted [*, 1, 2"),
        ((1, 2, 4, 1, 2, 2), (5, 1, 2, 1, 2, 2), (1, 3), "pairs: got shape [1, 3], wanted [*, 2]"),
    ],
)
@pytest.mark.parametrize("swap", [store_pages, load_pages])
def test_wrong_shapes(
    swap: object, cache: tuple[int, ...], host: tuple[int, ...], pairs: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        swap(torch.zeros(cache), torch.zeros(host), torch.zeros(pairs, dtype=torch.int32))  # type: ignore[operator]


def test_wrong_types() -> None:
    cache, host, pairs = torch.zeros(1, 2, 4, 1, 2, 2), torch.zeros(5, 1, 2, 1, 2, 2), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=re.escape("pairs: got torch.float32, wanted torch.int32")):
        store_pages(cache, host, pairs)
    with pytest.raises(ValueError, match=re.escape("host_pages: got torch.float16, wanted torch.float32")):
        store_pages(cache, host.half(), pairs.int())
    with pytest.raises(ValueError, match=re.escape("kv_cache: got torch.int64")):
        load_pages(cache.long(), host.long(), pairs.int())
    with pytest.raises(ValueError, match="host_pages: got strides"):
        load_pages(cache, torch.zeros(5, 1, 2, 1, 2, 2).mT, pairs.int())


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile(capability: int) -> None:
    """One kernel for both ways and for any number of pairs, pages and places; it reads 16 bytes at a time."""
    for dtype, dim in ((torch.bfloat16, 128), (torch.float32, 128), (torch.bfloat16, 72)):
        with compiling_for(capability) as kernels:
            for num_pairs, num_pages, num_places in ((1, 2, 1), (5, 100, 16), (16, 48, 1000)):
                cache = torch.empty(36, 2, num_pages, 8, 64, dim, dtype=dtype, device="meta")
                host = torch.empty(num_places, 36, 2, 8, 64, dim, dtype=dtype, device="meta")
                pairs = torch.empty(num_pairs, 2, dtype=torch.int32, device="meta")
                store_pages(cache, host, pairs)
                load_pages(cache, host, pairs)
        assert len({kernel.hash for kernel in kernels}) == 1
        assert kernels[0].asm["cubin"]
        assert "ld.global.v4" in kernels[0].asm["ptx"]
        assert "st.global.v4" in kernels[0].asm["ptx"]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
