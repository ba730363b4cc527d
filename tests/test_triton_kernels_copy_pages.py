"""Pages are copied to the bit, whatever they hold, and no other number of the cache changes."""

import re

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.copy_pages import copy_pages
from tercet.triton_kernels.dispatch import INTERPRETED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [
    (1, 2, 5, 1, 1, 3),
    (3, 2, 9, 2, 16, 24),
    (2, 2, 12, 3, 64, 80),
    (3, 1, 9, 1, 16, 72),
    (36, 2, 12, 8, 64, 128),
]
"""The last is that of a real model, for GPUs."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


def bits(cache: Tensor) -> Tensor:
    return cache.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[cache.dtype.itemsize]).cpu()


def random_cache(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Whatever bits: NaN and infinities are among them."""
    sizes = *shape[:-1], shape[-1] * dtype.itemsize
    cache = torch.randint(0, 256, sizes, dtype=torch.uint8).view(dtype).to(device)
    cache[:, :, shape[2] // 2] = float("nan")
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and shape[0] > 3:
        pytest.skip("takes long")
    cache = random_cache(shape, dtype, device)
    num_pages = shape[2]
    targets = torch.randperm(num_pages)[: num_pages // 3]
    others = [page for page in range(num_pages) if page not in targets.tolist()]
    sources = torch.tensor(others)[torch.randint(len(others), (len(targets),))]  # one page may go to several
    wanted = bits(cache).clone()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for layer in range(shape[0]):
            for which in range(shape[1]):
                wanted[layer, which, target] = wanted[layer, which, source]
    pairs = [[-1, -1], *torch.stack((sources, targets), 1).tolist(), [-1, 0], [0, num_pages], [2**31 - 1, -(2**31)]]
    copy_pages(cache, torch.tensor(pairs, dtype=torch.int32, device=device))
    assert torch.equal(bits(cache), wanted)


def test_nothing_to_copy(device: str) -> None:
    cache = random_cache(SHAPES[1], torch.float32, device)
    before = bits(cache).clone()
    copy_pages(cache, torch.empty(0, 2, dtype=torch.int32, device=device))
    assert torch.equal(bits(cache), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_in_a_graph_with_other_pairs() -> None:
    """Captured on padding, replayed on whatever pairs stand there later."""
    cache = random_cache(SHAPES[2], torch.bfloat16, "cuda")
    pairs = torch.full((8, 2), -1, dtype=torch.int32, device="cuda")
    copy_pages(cache, pairs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_pages(cache, pairs)
    wanted = bits(cache).clone()
    pairs[3], pairs[5] = torch.tensor([4, 7]), torch.tensor([4, 11])
    graph.replay()
    wanted[:, :, 7] = wanted[:, :, 11] = wanted[:, :, 4]
    assert torch.equal(bits(cache), wanted)


@pytest.mark.parametrize(
    ("cache", "pairs", "message"),
    [
        (torch.zeros(1, 3, 4, 1, 2, 2), torch.zeros(1, 2, dtype=torch.int32), "kv_cache: got shape [1, 3, 4, 1, 2, 2]"),
        (torch.zeros(1, 2, 4, 2), torch.zeros(1, 2, dtype=torch.int32), "kv_cache: got shape [1, 2, 4, 2]"),
        (torch.zeros(1, 2, 4, 1, 2, 2).long(), torch.zeros(1, 2, dtype=torch.int32), "kv_cache: got torch.int64"),
        (torch.zeros(1, 2, 4, 1, 2, 3).mT, torch.zeros(1, 2, dtype=torch.int32), "kv_cache: got strides"),
        (torch.zeros(1, 2, 4, 1, 2, 2), torch.zeros(1, 3, dtype=torch.int32), "pairs: got shape [1, 3], wanted [*, 2]"),
        (torch.zeros(1, 2, 4, 1, 2, 2), torch.zeros(1, 2), "pairs: got torch.float32, wanted torch.int32"),
        (torch.zeros(1, 2, 4, 1, 2, 2), torch.zeros(2, 2, dtype=torch.int32).T, "pairs: got strides"),
        (torch.zeros(1, 2, 4, 1, 2, 2), torch.zeros(1, 2, dtype=torch.int32, device="meta"), "pairs: got a tensor on"),
    ],
)
def test_wrong_tensors(cache: Tensor, pairs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        copy_pages(cache, pairs)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile(capability: int) -> None:
    pairs = torch.empty(5, 2, dtype=torch.int32, device="meta")
    with compiling_for(capability) as kernels:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            copy_pages(torch.empty(36, 2, 100, 8, 64, 128, dtype=dtype, device="meta"), pairs)
    assert len(kernels) == 3
    for kernel in kernels:
        assert kernel.asm["cubin"], kernel.name
        assert "ld.global.v4" in kernel.asm["ptx"]
        assert "st.global.v4" in kernel.asm["ptx"]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
