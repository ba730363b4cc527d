"""Rows of the kernel bench for attention to latents: of DeepSeek-V2-Lite's 16 heads, GLM-4.7-Flash's 20, and 128.

Latents of 512 numbers with 64 behind them, pages of 64 tokens in random order. What must move is the cache once; heads
of one program share it. The products between heads and latents stand beside them.
"""

from collections.abc import Iterator, Sequence

import torch

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.latent_attention import (
    latent_decode_attention,
    latent_prefill_attention,
    plan_latent_chunks,
    plan_latent_decode,
    plan_latent_prefill,
)
from tercet.triton_kernels.latent_heads import latent_queries, latent_values
from tercet.triton_kernels.latent_hopper import attend_in_room
from tercet.triton_kernels.latent_prologue import latent_prologue
from tercet.triton_kernels.latent_room import expand_latents, room_for

_RANK, _TURNED, _PAGE = 512, 64, 64
_DIM = _RANK + _TURNED
_SCALE = 192**-0.5


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for num_heads in (16, 20, 128):
        for name, lengths in (
            ("B=1 C=1024", [1024]),
            ("B=8 C=1024", [1024] * 8),
            ("B=64 C=1024", [1024] * 64),
            ("B=64 C=8192", [8192] * 64),
            ("B=1 C=32768", [32768]),
        ):
            for cells in (torch.bfloat16, FP8) if num_heads == 16 else (torch.bfloat16,):
                yield _decode_row(stopwatch, name, lengths, num_heads, cells)
    for num_heads, length, batch in ((16, 1024, 8), (16, 8192, 1), (20, 8192, 1), (128, 4096, 1)):
        yield _prefill_row(stopwatch, num_heads, length, batch)
    for num_heads, still, value, length, batch in (
        (16, 128, 128, 1024, 8),
        (16, 128, 128, 8192, 1),
        (20, 192, 256, 8192, 1),
    ):
        yield from _room_rows(stopwatch, num_heads, still, value, length, batch)
    for num_heads, still, value, query in ((16, 128, 128, 0), (20, 192, 256, 768)):
        for num_tokens in (1, 8, 64, 8192):
            yield from _heads_rows(stopwatch, num_heads, still, value, num_tokens)
            yield _prologue_row(stopwatch, query, num_tokens)


def _decode_row(stopwatch: Stopwatch, name: str, lengths: Sequence[int], num_heads: int, cells: torch.dtype) -> Row:
    batch, pages_each = len(lengths), -(-max(lengths) // _PAGE)
    num_pages = batch * pages_each + 1
    num_bytes = cells.itemsize * _DIM * sum(lengths)
    copies = min(stopwatch.copies(num_bytes), 16)
    caches = [_cache(stopwatch, copy, num_pages, cells) for copy in range(copies)]
    table = _pages(batch, pages_each)
    slots, lengths_B = _integers(range(batch)), _integers(lengths)
    q, out = stopwatch.cut(7, batch, num_heads, _DIM), _empty(batch, num_heads, _RANK)
    work = plan_latent_decode(lengths_B, slots, table, caches[0], num_heads, _RANK, deterministic=False)

    def run(index: int) -> None:
        latent_decode_attention(q, caches[index], table, slots, lengths_B, _SCALE, _RANK, work=work, out=out)

    flops = 2.0 * num_heads * sum(lengths) * (_DIM + _RANK)
    shape = f"{name} H={num_heads}{' fp8' if cells == FP8 else ''}"
    return Row("latent_decode_attention", shape, run, copies, num_bytes, flops)


def _prefill_row(stopwatch: Stopwatch, num_heads: int, length: int, batch: int) -> Row:
    pages_each, num_tokens = length // _PAGE, length * batch
    cache = _cache(stopwatch, 0, batch * pages_each + 1, torch.bfloat16)
    table = _pages(batch, pages_each)
    chunks = _integers(range(batch)), _integers([0] * batch), _integers(range(0, num_tokens + 1, length))
    q, out = stopwatch.cut(3, num_tokens, num_heads, _DIM), _empty(num_tokens, num_heads, _RANK)
    work = plan_latent_prefill(*chunks, num_tokens, num_heads)

    def run(index: int) -> None:
        latent_prefill_attention(q, cache, table, *chunks, _SCALE, _RANK, work=work, out=out)

    flops = 1.0 * batch * num_heads * length * length * (_DIM + _RANK)
    num_bytes = 2.0 * (q.numel() + out.numel())
    return Row("latent_prefill_attention", f"S={length} B={batch} H={num_heads}", run, 1, num_bytes, flops, nodes=4)


def _room_rows(stopwatch: Stopwatch, num_heads: int, still: int, value: int, length: int, batch: int) -> Iterator[Row]:
    """The same by keys and values that are made first: what makes them, and attention to them."""
    pages_each, num_tokens = length // _PAGE, length * batch
    cache = _cache(stopwatch, 0, batch * pages_each + 1, torch.bfloat16)
    table, up = _pages(batch, pages_each), stopwatch.cut(5, num_heads, still + value, _RANK)
    slots, starts, begins = _integers(range(batch)), _integers([0] * batch), _integers(range(0, num_tokens + 1, length))
    room = room_for(num_tokens, batch, length, num_heads, still, _TURNED, value, cache)
    if room is None:
        return
    tokens = _integers([num_tokens])
    work = plan_latent_chunks(slots, starts, begins, tokens, 0, num_tokens, num_heads, room)[0].in_room
    assert work is not None
    q = stopwatch.cut(3, num_tokens, num_heads * (still + _TURNED))
    turned, out = stopwatch.cut(11, num_tokens, num_heads, _DIM), _empty(num_tokens, num_heads, value)

    def expand(index: int) -> None:
        expand_latents(cache, up, table, slots, starts, begins, room)

    def attend(index: int) -> None:
        attend_in_room(q, turned, cache, table, _SCALE, still, work, room, out)

    name = f"S={length} B={batch} H={num_heads} {still}+{value}"
    made = num_heads * (still + value)
    yield Row("expand_latents", name, expand, 1, 2.0 * num_tokens * made, 2.0 * num_tokens * made * _RANK, nodes=4)
    flops = 1.0 * batch * num_heads * length * length * (still + _TURNED + value)
    yield Row("attend_in_room", name, attend, 1, 2.0 * (q.numel() + out.numel()), flops, nodes=4)


def _heads_rows(stopwatch: Stopwatch, num_heads: int, still: int, value: int, num_tokens: int) -> Iterator[Row]:
    ups = stopwatch.rotation(num_heads, still + value, _RANK)[:16]
    positions, cos_sin = _integers(range(num_tokens)), torch.randn(num_tokens, _TURNED, device="cuda")
    q = stopwatch.cut(3, num_tokens, num_heads * (still + _TURNED))
    attended = stopwatch.cut(11, num_tokens, num_heads, _RANK)
    shape = f"T={num_tokens} H={num_heads} {still}+{value}"

    def to_latents(index: int) -> None:
        latent_queries(q, ups[index], still, positions, cos_sin, in_pairs=True)

    def to_values(index: int) -> None:
        latent_values(attended, ups[index], still)

    for name, run, numbers in (("latent_queries", to_latents, still), ("latent_values", to_values, value)):
        flops = 2.0 * num_tokens * num_heads * numbers * _RANK
        num_bytes = 2.0 * num_heads * (numbers * _RANK + num_tokens * (numbers + _RANK))
        yield Row(name, shape, run, len(ups), num_bytes, flops)


def _prologue_row(stopwatch: Stopwatch, query: int, num_tokens: int) -> Row:
    others = query or 16 * 192
    rows = stopwatch.rotation(num_tokens, others + _DIM)
    cache = _empty(num_tokens // _PAGE + 2, 1, _PAGE, _DIM)
    positions, cos_sin = _integers(range(num_tokens)), torch.randn(num_tokens, _TURNED, device="cuda")
    slots = torch.arange(_PAGE, _PAGE + num_tokens, device="cuda")
    norm, query_norm = stopwatch.cut(5, _RANK), stopwatch.cut(9, query) if query else None

    def run(index: int) -> None:
        latent_prologue(rows[index], positions, slots, cos_sin, norm, query_norm, 1e-6, cache, in_pairs=True)

    return Row("latent_prologue", f"T={num_tokens} Q={query}", run, len(rows), 4.0 * num_tokens * (query + _DIM))


def _cache(stopwatch: Stopwatch, copy: int, num_pages: int, cells: torch.dtype) -> torch.Tensor:
    # Copies must not share memory: the second would come from the L2 cache.
    return stopwatch.cut(copy * (num_pages * _PAGE * _DIM + 512), num_pages, 1, _PAGE, _DIM).to(cells)


def _pages(batch: int, pages_each: int) -> torch.Tensor:
    return (torch.randperm(batch * pages_each, device="cuda") + 1).int().view(batch, pages_each)


def _integers(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cuda")


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
