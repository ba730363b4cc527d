"""The kernels of attention to latents compile for GPUs that are not here, at the sizes of real models."""

import pytest
import torch
from torch import Tensor

from covering import long
from ptx_arithmetic import exponentials
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.latent_attention import (
    latent_decode_attention,
    latent_prefill_attention,
    plan_latent_chunks,
    plan_latent_decode,
)
from tercet.triton_kernels.latent_heads import latent_queries, latent_values
from tercet.triton_kernels.latent_hopper import attend_in_room
from tercet.triton_kernels.latent_prologue import latent_prologue
from tercet.triton_kernels.latent_room import expand_latents, room_for

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")

BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("capability", "heads", "rank", "turned", "dtype", "cells", "tries", "deterministic"),
    [
        (90, 16, 512, 64, BF16, BF16, 1, False),
        long(90, 128, 512, 64, BF16, BF16, 1, True),
        long(90, 20, 512, 64, torch.float16, torch.float16, 5, False),
        long(90, 40, 256, 32, BF16, BF16, 3, False),
        long(90, 32, 256, 64, BF16, BF16, 1, False),
        long(90, 16, 512, 64, BF16, FP8, 1, False),
        long(90, 16, 512, 64, FP32, FP32, 1, False),
        long(80, 16, 512, 64, BF16, BF16, 1, False),
        long(80, 128, 512, 64, FP32, FP32, 1, True),
        long(89, 32, 512, 64, BF16, BF16, 3, True),
        long(89, 16, 512, 64, BF16, FP8, 1, False),
        long(89, 16, 512, 64, FP32, FP32, 1, False),
    ],
)
def test_attention(
    capability: int, heads: int, rank: int, turned: int, dtype: torch.dtype, cells: torch.dtype, tries: int,
    deterministic: bool,
) -> None:  # fmt: skip
    cache, table, rows = meta(100, 1, 64, rank + turned, dtype=cells), ints(9, 64), ints(5)
    q = meta(5 * tries, heads, rank + turned, dtype=dtype)
    lengths_T = ints(5 * tries) if tries > 1 else None
    with compiling_for(capability) as kernels:
        work = plan_latent_decode(
            rows, rows, table, cache, heads, rank, deterministic=deterministic, tries=tries, lengths_T=lengths_T
        )  # fmt: skip
        how = {"work": work, "tries": tries, "lengths_T": lengths_T}
        latent_decode_attention(q, cache, table, rows, rows, 0.1, rank, **how)  # type: ignore[arg-type]
        q = meta(300, heads, rank + turned, dtype=dtype)
        latent_prefill_attention(q, cache, table, rows, rows, ints(6), 0.1, rank)
    names = [kernel.name for kernel in kernels]
    assert names == ["_work_kernel", "_latent_decode_kernel", "_merge_kernel", "_cut_kernel", "_latent_prefill_kernel"]
    if dtype != FP32:
        # Every score of a tile by the same arithmetic, masked or not, and nothing of it left to the assembler.
        found = exponentials(kernels[-1].asm["ptx"])
        assert len(found) == 1, found
        assert not any("?" in expression for expression in found), found
    if capability == 90:
        assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels)
        assert ("wgmma" in kernels[1].asm["ptx"]) == (dtype != FP32)


@pytest.mark.parametrize("capability", [90, long(80), long(89)])
@pytest.mark.parametrize(
    ("heads", "still", "value", "rank", "query", "dtype"),
    [
        (16, 128, 128, 512, 0, BF16),
        long(20, 192, 256, 512, 768, BF16),
        long(40, 64, 64, 256, 768, FP32),
        long(32, 64, 128, 256, 1024, BF16),
    ],
)
def test_products_around_it(
    capability: int, heads: int, still: int, value: int, rank: int, query: int, dtype: torch.dtype
) -> None:
    up, table = meta(heads, still + value, rank, dtype=dtype), meta(4096, 64, dtype=FP32)
    cache, norm = meta(100, 1, 64, rank + 64, dtype=dtype), meta(rank, dtype=dtype)
    counts = 1, 64, 8192
    with compiling_for(capability) as kernels:
        for count in counts:
            others = query or heads * (still + 64)
            query_norm = meta(query, dtype=dtype) if query else None
            places = ints(count), meta(count, dtype=torch.int64)
            x = meta(count, others + rank + 64, dtype=dtype)
            latent_prologue(x, *places, table, norm, query_norm, 1e-6, cache, in_pairs=True, rows=ints(1))
            q = meta(count, heads * (still + 64), dtype=dtype)
            latent_queries(q, up, still, places[0], table, in_pairs=True, rows=ints(1), few=ints(1))
            latent_values(meta(count, heads, rank, dtype=dtype), up, still, ints(1))
    assert len(kernels) == 3 * len(counts)


@pytest.mark.parametrize(
    ("heads", "still", "value", "rank", "num_tokens"),
    [
        (16, 128, 128, 512, 8192),
        long(16, 128, 128, 512, 256),
        long(20, 192, 256, 512, 256),
        long(20, 192, 256, 512, 8192),
        long(8, 64, 128, 256, 8192),
    ],
)
def test_in_room(heads: int, still: int, value: int, rank: int, num_tokens: int) -> None:
    cache, table, rows, starts = meta(100, 1, 64, rank + 64), ints(9, 640), ints(5), ints(6)
    with compiling_for(90) as kernels:
        room = room_for(num_tokens, 5, 40_960, heads, still, 64, value, cache)
        assert room is not None
        works = plan_latent_chunks(rows, rows, starts, ints(1), 8, num_tokens, heads, room)
        expand_latents(cache, meta(heads, still + value, rank), table, rows, rows, starts, room)
        for work in works:
            assert work.in_room is not None
            q, turned = meta(num_tokens, heads * (still + 64)), meta(num_tokens, heads, rank + 64)
            out = meta(num_tokens, heads, value)
            attend_in_room(q, turned, cache, table, 0.1, still, work.in_room, room, out)
    ends = [kernel for kernel in kernels if kernel.name in ("_expand_kernel", "_room_prefill_kernel")]
    assert len(ends) == 3
    assert all("wgmma" in kernel.asm["ptx"] for kernel in ends)
    # Few tiles leave multiprocessors to smaller ones.
    assert ends[-1].metadata.num_warps == (8 if num_tokens == 256 else 12)


def test_where_there_is_no_room() -> None:
    sizes = {"num_tokens": 512, "num_chunks": 5, "longest": 4096, "num_heads": 16, "still": 128, "turned": 64}
    cache = meta(100, 1, 64, 576)
    with compiling_for(90):
        assert room_for(**sizes, value=128, cache=cache) is not None
        assert room_for(**{**sizes, "num_tokens": 255}, value=128, cache=cache) is None
        assert room_for(**{**sizes, "still": 96}, value=128, cache=cache) is None
        assert room_for(**sizes, value=96, cache=cache) is None
        assert room_for(**sizes, value=128, cache=meta(100, 1, 32, 576)) is None
        assert room_for(**sizes, value=128, cache=cache.to(FP8)) is None
    with compiling_for(80):
        assert room_for(**sizes, value=128, cache=cache) is None
