"""Prefill attention of prompts with images, whose tokens see each other: against float64, and compiled for Hopper.

The references here; the kernels in Triton's interpreter, by running this file once more.
"""

from dataclasses import replace

import pytest
import torch

from covering import long
from interpreted import rerun_interpreted
from paged_attention import Heads, PagedCache, assert_near
from tercet.triton_kernels import attention
from tercet.triton_kernels.attention import DEEP, DEEPER
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, use_kernels

Chunks = list[tuple[int, int, int]]
SMALL = Heads(4, 2, 16, 16)
LENGTHS = [90, 70, 40, 130]
IMAGES = {0: [(3, 15), (17, 61)], 1: [(0, 40), (41, 42)], 3: [(15, 17), (30, 33), (64, 128)]}
"""Longer and shorter than tiles and pages, from the first position on, over borders of both, of one token alone."""
CHUNKS: list[Chunks] = [
    [(0, 0, 90), (1, 0, 40), (2, 0, 40), (3, 0, 128)],
    [(0, 2, 14), (3, 64, 65), (1, 40, 2), (2, 5, 9)],
    [(0, 30, 31), (3, 100, 28), (1, 39, 31)],  # behind parts of images that are in the cache
    [(1, 39, 1), (0, 60, 1)],
]


@pytest.mark.parametrize(
    "heads",
    [
        SMALL,
        replace(SMALL, window=20),
        long(replace(SMALL, window=3)),
        long(replace(SMALL, window=7, sinks=True)),
        long(replace(SMALL, softcap=3.0)),
        long(Heads(2, 1, 24, 32, window=50)),
    ],
    ids=str,
)
def test_tokens_of_an_image_see_each_other(heads: Heads) -> None:
    """And those of another, or words, only behind themselves; of a window, its length back."""
    cache = PagedCache(heads, LENGTHS, "cpu", torch.float32, images=IMAGES)
    for chunks in CHUNKS:
        q = cache.queries(sum(count for _, _, count in chunks) + 3)
        got = cache.prefill(q, chunks, deep=DEEP)
        assert_near(cache, q, got, chunks, 1e-5)
        if use_kernels(q):  # of each chunk the last token alone: the same bits
            few, end = cache.prefill(q, chunks, only_last=True), 0
            for _, _, count in chunks:
                end += count
                assert torch.equal(few[end - 1], got[end - 1])


def test_what_a_query_gets_does_not_follow_its_chunk() -> None:
    """To the bit: whatever of an image is cached, and whatever comes behind it."""
    cache = PagedCache(SMALL, LENGTHS, "cpu", torch.float32, images=IMAGES)
    q = cache.queries(90)
    whole = cache.prefill(q, [(0, 0, 90)])
    for start, count in ((0, 61), (17, 60), (32, 58), (48, 13), (61, 29)):
        assert torch.equal(cache.prefill(q[start : start + count], [(0, start, count)]), whole[start : start + count])


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("head_dim", "num_tokens", "cells", "window", "name"),
    [
        (256, 300, torch.bfloat16, 0, "hopper_prefill_kernel"),
        (256, 300, torch.bfloat16, 1024, "hopper_prefill_kernel"),
        long(256, 3000, torch.bfloat16, 0, "hopper_prefill_kernel"),
        long(128, 3000, torch.bfloat16, 0, "hopper_prefill_kernel"),
        long(128, 300, FP8, 0, "fp8_prefill_kernel"),
    ],
)
def test_compile(head_dim: int, num_tokens: int, cells: torch.dtype, window: int, name: str) -> None:
    """Tiles are not cut by keys, however few they are."""
    cache, table, indices = meta(100, 8, 64, head_dim, dtype=cells), meta(9, 64).int(), meta(5).int()
    chunks, ends_T = (indices, indices, meta(6).int()), meta(num_tokens).int()
    with compiling_for(90) as kernels:
        scoring = Scoring(0.1, window)
        work = attention.plan_prefill(*chunks, num_tokens, 16, cache, scoring, deep=DEEPER, ends_T=ends_T)
        q = meta(num_tokens, 16, head_dim)
        attention.prefill_attention(
            q, cache, cache, table, *chunks, 0.1, work=work, window=window, ends_T=ends_T
        )  # fmt: skip
    assert [kernel.name for kernel in kernels] == ["_cut_kernel", name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(8, 4, 256, 64),
        Heads(8, 4, 256, 64, window=200),
        Heads(32, 16, 128, 64),
        Heads(32, 16, 128, 64, window=1024),
        Heads(16, 2, 64, 128),
        Heads(8, 4, 80, 16),
    ],
    ids=str,
)
def test_on_a_gpu(heads: Heads, cells: torch.dtype | None) -> None:
    images = {
        0: [(4, 260), (266, 522), (1000, 1256)],
        1: [(0, 256), (300, 301), (1500, 1756)],
        2: [(60, 66), (127, 129), (640, 1664)],
        3: [(3072, 3328)],
    }
    cache = PagedCache(heads, [1300, 1756, 1800, 3400], "cuda", torch.bfloat16, cells, images)
    for chunks, padding in (
        ([(0, 0, 1300), (1, 0, 301), (2, 0, 600), (3, 0, 3000)], 70),
        ([(0, 270, 252), (1, 1499, 257), (2, 640, 1024), (3, 3100, 300)], 0),
        ([(0, 1255, 1), (3, 3070, 260)], 9),
        ([(3, 3327, 1)], 0),
        ([(1, 200, 56)], 8),
    ):
        q = cache.queries(sum(count for _, _, count in chunks) + padding)
        got = cache.prefill(q, chunks, deep=DEEPER)
        assert_near(cache, q, got, chunks, 5e-3)
        few, end = cache.prefill(q, chunks, only_last=True), 0
        for _, _, count in chunks:
            end += count
            assert torch.equal(few[end - 1], got[end - 1])
    q = cache.queries(1300)
    whole = cache.prefill(q, [(0, 0, 1300)])
    for start, count in ((0, 522), (100, 160), (266, 1034), (1256, 44)):
        assert torch.equal(cache.prefill(q[start : start + count], [(0, start, count)]), whole[start : start + count])


def test_interpreted() -> None:
    rerun_interpreted(__file__)
