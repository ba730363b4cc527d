"""On a GPU: attention in bf16 against float64, over pages full of NaN where nothing is; every head size and group."""

import random

import pytest
import torch

from paged_attention import Heads, PagedCache, assert_near, distance
from tercet.triton_kernels.attention import DEEP, DEEPER
from tercet.triton_kernels.checks import FP8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE, DTYPE = "cuda", torch.bfloat16
NEAR = 5e-3
NEAR_SINKS = 7e-3
"""Beside a sink a lone key's weight is less than one: it is rounded, by up to 2**-8, and so is what comes of it."""


def near(heads: Heads) -> float:
    return NEAR_SINKS if heads.sinks else NEAR


"""Weights and output are rounded to bf16, which errs by 1e-3; one position too many or too few of 2,000 by 2e-2."""

HEADS = [
    Heads(16, 8, 128, 64),
    Heads(32, 8, 128, 16),
    Heads(32, 4, 128, 64, window=200),
    Heads(28, 4, 128, 128, softcap=8.0),
    Heads(8, 8, 64, 64),
    Heads(9, 3, 64, 16, window=37, softcap=5.0),
    Heads(6, 1, 64, 128, alibi=True),
    Heads(15, 3, 80, 64),
    Heads(8, 8, 80, 16, alibi=True, softcap=20.0),
    Heads(4, 2, 96, 64, window=1),
    Heads(14, 2, 96, 128),
    Heads(8, 2, 256, 64),
    Heads(8, 4, 256, 16, window=600, softcap=30.0),
    Heads(8, 4, 256, 64, window=1024),
    Heads(16, 2, 64, 64, window=50),
    Heads(64, 8, 64, 64, sinks=True),
    Heads(64, 8, 64, 64, window=128, sinks=True),
    Heads(6, 2, 80, 16, softcap=20.0, alibi=True, sinks=True),
]


def lengths_of(page: int) -> list[int]:
    return [0, 1, 2, page - 1, page, page + 1, 511, 512, 513, 1024, 1777, 2300]


@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode(heads: Heads, deterministic: bool, cells: torch.dtype | None) -> None:
    cache = PagedCache(heads, lengths_of(heads.page), DEVICE, DTYPE, cells)
    everyone = list(range(len(cache.lengths)))
    many = [*everyone, *everyone, *everyone]
    random.shuffle(many)
    for slots in (many, [10], [4, 0, 11]):
        q = cache.queries(len(slots))
        lengths = [cache.lengths[slot] for slot in slots]
        got = cache.decode(q, slots, lengths, deterministic=deterministic)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            if length:
                error = distance(got[row], cache.exact(q[row : row + 1], slot, length - 1)[0])
                assert error < near(heads), (slot, length)
            else:
                assert not got[row].count_nonzero()


@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill(heads: Heads, cells: torch.dtype | None) -> None:
    lengths = lengths_of(heads.page)
    cache = PagedCache(heads, lengths, DEVICE, DTYPE, cells)
    ends = [(11, 1000, 1300), (0, 0, 0), (5, 0, lengths[5]), (9, 1023, 1), (10, 1500, 277), (8, 1, 512), (3, 2, 3)]
    middle = [(7, 100, 65), (6, 0, 64), (10, 777, 1), (4, 0, 1)]
    for chunks, padding in ((ends, 70), (middle, 0), ([(10, 1770, 7)], 9), ([(0, 0, 0)], 5)):
        q = cache.queries(sum(count for _, _, count in chunks) + padding)
        got = cache.prefill(q, chunks)
        assert_near(cache, q, got, chunks, near(heads))
        few, end = cache.prefill(q, chunks, only_last=True), 0
        for _, _, count in chunks:
            end += count
            assert not count or torch.equal(few[end - 1], got[end - 1])


@pytest.mark.parametrize(
    "heads",
    [
        *HEADS[:2],
        *HEADS[4:6],
        Heads(16, 4, 256, 64),
        Heads(64, 8, 128, 64),
        Heads(28, 4, 128, 64),
        Heads(2, 1, 64, 128),
        Heads(8, 1, 64, 64, sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("deep", "cells"), [(DEEP, None), (DEEPER, None), (DEEPER, FP8)])
def test_few_queries_behind_many(heads: Heads, deep: int, cells: torch.dtype | None) -> None:
    """Tiles that are cut by keys too, beside some that are not; ends of parts anywhere in a tile's mask."""
    cache = PagedCache(heads, [9000, 300, 7 * 128 + 64, 5000, 8192 + 65, 1], DEVICE, DTYPE, cells)
    for chunks, padding in (
        ([(0, 8960, 40)], 24),
        ([(0, 8990, 10), (1, 0, 1), (2, 900, 60), (3, 4900, 100), (4, 8191, 66)], 19),
        ([(4, 8129, 64)], 0),
        ([(4, 8000, 257)], 0),
        ([(0, 5000, 449), (3, 4000, 31)], 32),
        ([(1, 3, 250), (5, 0, 1)], 5),
        ([(slot, random.randrange(cache.lengths[slot] - 50), random.randint(1, 50)) for slot in range(5)], 0),
    ):
        q = cache.queries(sum(count for _, _, count in chunks) + padding)
        got = cache.prefill(q, chunks, deep=deep)
        assert_near(cache, q, got, chunks, near(heads))


def test_random_chunks_and_rows() -> None:
    """Chunks that start and end anywhere, dozens at a time, of the sizes that serving sees."""
    cache = PagedCache(HEADS[0], [random.randint(1, 3000) for _ in range(40)], DEVICE, DTYPE)
    for _ in range(4):
        chunks = []
        for slot in random.sample(range(40), 30):
            start = random.randrange(cache.lengths[slot])
            chunks.append((slot, start, random.randint(1, min(400, cache.lengths[slot] - start))))
        q = cache.queries(sum(count for _, _, count in chunks))
        got = cache.prefill(q, chunks)
        assert_near(cache, q, got, chunks, NEAR)
        slots = random.sample(range(40), 37)
        lengths = [random.randint(0, cache.lengths[slot]) for slot in slots]
        q = cache.queries(37)
        for deterministic in (False, True):
            got = cache.decode(q, slots, lengths, deterministic=deterministic)
            for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                if length:
                    assert distance(got[row], cache.exact(q[row : row + 1], slot, length - 1)[0]) < NEAR
                else:
                    assert not got[row].count_nonzero()
