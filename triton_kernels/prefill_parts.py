"""How the tiles of a few queries behind many tokens are cut once more, by keys: once per step, on the device.

One program for a tile and a head would walk all that its queries see while most multiprocessors have nothing. Parts of
a tile are attended to apart, each relative to its own largest scores, and merged.

Shape suffixes: T prefill tokens, N tiles, I parts, Q queries of all parts, H q heads, D head size.
"""

import torch
import triton
import triton.language as tl

from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prefill_work import RECORD, PartialSums, PrefillWork
from tercet.triton_kernels.tiles import next_power_of_2

MOST_QUERIES = 512
"""One program cuts the tiles of all, and is compiled once for any number of them."""
_TILES = 16
"""Of so many queries in a few chunks."""
_FEWEST = 4
"""Tiles of keys in a part. Of fewer than three a query may see nothing."""
_SIZES = ["T", "N", "num_records"]


@triton.jit
def _num_parts(tiles_of_keys, most, FEWEST: tl.constexpr):
    """In how many parts of `most` tiles of keys, or of fewer, tiles of queries are cut."""
    return tl.minimum(tl.cdiv(tiles_of_keys, most), tl.maximum(tiles_of_keys // FEWEST, 1))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _part_kernel(
    tiles_ptr, parts_ptr, counts_ptr, starts_ptr, T, N, num_records,
    AT_ONCE: tl.constexpr, KEYS: tl.constexpr, FEWEST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,): parts as short as they can be while there are no more than `AT_ONCE`."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    tiles = tl.arange(0, BLOCK_N)
    num_tiles = tl.load(tiles_ptr + N * RECORD)
    padded = tl.load(tiles_ptr + N * RECORD + 1)
    real = tiles < num_tiles
    keys = tl.cdiv(tl.load(tiles_ptr + tiles * RECORD + 4, mask=real, other=0), KEYS)
    most = tl.max(keys, 0)
    too_few = most * 0
    while too_few + 1 < most:
        middle = (too_few + most) // 2
        fits = tl.sum(tl.where(real, _num_parts(keys, middle, FEWEST), 0), 0) <= AT_ONCE
        most = tl.where(fits, middle, most)
        too_few = tl.where(fits, too_few, middle)
    counts = tl.where(real, _num_parts(keys, tl.maximum(most, 1), FEWEST), 0)
    ends = tl.cumsum(counts, 0)
    begins = ends - counts
    num_parts = tl.sum(counts, 0)

    index = tl.arange(0, BLOCK_I)
    of_tile = index < num_parts
    own = tl.sum(((ends[None, :] <= index[:, None]) & real[None, :]).to(tl.int32), 1)
    is_own = tiles[None, :] == own[:, None]
    part = index - tl.sum(tl.where(is_own, begins[None, :], 0), 1)
    count = tl.maximum(tl.sum(tl.where(is_own, counts[None, :], 0), 1), 1)
    own_keys = tl.sum(tl.where(is_own, keys[None, :], 0), 1)
    own = tl.where(of_tile, own, num_tiles + index - num_parts)  # behind the parts the tiles of padding
    own_ptr = tiles_ptr + own * RECORD
    mask = index < num_parts + padded - num_tiles
    seen = tl.load(own_ptr + 4, mask=mask, other=0)
    end = (part + 1) * own_keys // count * KEYS
    part_ptr = parts_ptr + index * RECORD
    # Behind the tiles of padding, tiles of nothing.
    inside = index < num_records
    for word in tl.static_range(4):
        tl.store(part_ptr + word, tl.load(own_ptr + word, mask=mask, other=0), mask=inside)
    tl.store(part_ptr + 4, tl.where(of_tile & (part + 1 < count), end, seen), mask=inside)
    tl.store(part_ptr + 5, tl.load(own_ptr + 5, mask=mask, other=0), mask=mask)
    tl.store(part_ptr + 6, part * own_keys // count, mask=mask)
    tl.store(part_ptr + 7, count, mask=mask)
    tl.store(parts_ptr + num_records * RECORD, num_parts)
    tl.store(parts_ptr + num_records * RECORD + 1, num_parts + padded - num_tiles)

    tokens = tl.arange(0, BLOCK_T)
    first = tl.load(tiles_ptr + tiles * RECORD, mask=real, other=0)
    queries = tl.load(tiles_ptr + tiles * RECORD + 1, mask=real, other=0)
    offset = tokens[:, None] - first[None, :]
    within = (offset >= 0) & (offset < queries[None, :])
    # Tokens of padding, as those of tiles that are whole, have nothing to merge.
    tl.store(counts_ptr + tokens, tl.maximum(tl.sum(tl.where(within, counts[None, :], 0), 1), 1), mask=tokens < T)
    starts = tl.sum(tl.where(within, begins[None, :] * BLOCK_Q + offset, 0), 1)
    tl.store(starts_ptr + tokens, starts, mask=tokens < T)


def plan_prefill_parts(
    work: PrefillWork, num_tokens: int, num_heads: int, head_dim: int, num_programs: int, tile: int, *, heads: int = 1
) -> PrefillWork:
    """Cut the tiles in `work`, which are planned, into as many parts as there are programs for. Graph-safe.

    `tile`: keys of one tile of keys; `heads`: q heads of a program.
    """
    device = work.tiles_N8.device
    at_once = num_programs * heads // num_heads
    num_rows = max(at_once, 1) * work.block_q, num_heads
    # Behind the parts come tiles of padding.
    parts_I8 = torch.empty(at_once + work.num_tiles + 1, RECORD, dtype=torch.int32, device=device)
    counts_T, starts_T = torch.empty(2, num_tokens, dtype=torch.int32, device=device)
    sums_QHD = torch.empty(*num_rows, head_dim, dtype=torch.float32, device=device)
    stats_QH2 = torch.empty(*num_rows, 2, dtype=torch.float32, device=device)
    cut = PrefillWork(parts_I8, work.block_q, PartialSums(counts_T, starts_T, sums_QHD, stats_QH2), heads)
    block_n = max(next_power_of_2(work.num_tiles), _TILES)
    _part_kernel[(1,)](
        work.tiles_N8, parts_I8, counts_T, starts_T, num_tokens, work.num_tiles, cut.num_tiles,
        AT_ONCE=at_once, KEYS=tile, FEWEST=_FEWEST, BLOCK_Q=work.block_q,
        BLOCK_N=block_n, BLOCK_I=next_power_of_2(at_once + block_n),
        BLOCK_T=max(next_power_of_2(num_tokens), MOST_QUERIES), RECORD=RECORD, num_warps=4, **overlap_options(parts_I8),
    )  # fmt: skip
    return cut
