"""How a step's chunks are cut into tiles of queries: once per step, on the device, for the attention of all layers.

The tile that sees most tokens comes first, so that none is begun when the others are about to end. Integers only.

Shape suffixes: T prefill tokens, C chunks, C1 = C + 1, N tiles, Q queries of all parts, H q heads, D head size.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

RECORD = 8
_SIZES = ["C", "T", "N"]


@dataclass(frozen=True)
class PartialSums:
    """Where parts of tiles leave their sums, and how those of a token are found."""

    counts_T: Tensor
    """int32: parts of a token's tile; 1: it is whole, and nothing of it is here."""
    starts_T: Tensor
    """int32: where the token's first sums are. The next part's are a tile's queries behind."""
    sums_QHD: Tensor
    stats_QH2: Tensor
    """Largest scores, in units of log 2, and weights relative to them."""


@dataclass(frozen=True)
class PrefillWork:
    """The tiles of one step's chunks, and behind them those of its padding."""

    tiles_N8: Tensor
    """int32 records: first token, number of queries, position of the first, slot, tokens that the last query sees
    (0: padding), tokens of the sequence that the cache holds, the chunk. One record more has the number of tiles of
    chunks, and that number with those of padding. Of tiles that are cut by keys there is a record for each part: what
    it ends with instead of what the last query sees, the tile of keys it begins with, in how many parts the tile is
    cut."""
    block_q: int
    parts: PartialSums | None = None
    """Where tiles are cut by keys too."""
    heads: int = 1
    """q heads of a program, which see the same keys."""

    @property
    def num_tiles(self) -> int:
        """Tiles at most, those of padding included."""
        return self.tiles_N8.shape[0] - 1


def make_prefill_work(num_tokens: int, num_chunks: int, block_q: int, device: torch.device) -> PrefillWork:
    """Memory for any way of cutting so many tokens into so many chunks."""
    num_tiles = cdiv(num_tokens, block_q) + num_chunks
    return PrefillWork(torch.empty(num_tiles + 1, RECORD, dtype=torch.int32, device=device), block_q)


def make_last_tiles(num_chunks: int, work: PrefillWork) -> PrefillWork:
    """Memory for one tile of each chunk, of the size of those in `work`."""
    return PrefillWork(
        torch.empty(num_chunks + 1, RECORD, dtype=torch.int32, device=work.tiles_N8.device), work.block_q
    )


@triton.jit
def _num_within(seen, begin, count, BLOCK_Q: tl.constexpr):
    """Of the tiles of a chunk that begins at a position, how many see at most so many tokens."""
    tiles = tl.cdiv(count, BLOCK_Q)
    return tl.where(seen >= begin + count, tiles, tl.maximum(seen - begin, 0) // BLOCK_Q)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _cut_kernel(
    slots_ptr, chunk_starts_ptr, query_starts_ptr, ends_ptr, tiles_ptr, C, T, N,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles / BLOCK_N,): one program finds the chunks of BLOCK_N tiles, and their places, by counting."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    chunks = tl.arange(0, BLOCK_C)
    begins = tl.load(query_starts_ptr + chunks, mask=chunks < C, other=0)
    counts = tl.load(query_starts_ptr + chunks + 1, mask=chunks < C, other=0) - begins
    counts = tl.where(chunks < C, counts, 0)
    starts = tl.load(chunk_starts_ptr + chunks, mask=chunks < C, other=0)
    tiles = tl.cdiv(counts, BLOCK_Q)
    ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)

    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.sum(((ends[None, :] <= index[:, None]) & (chunks < C)[None, :]).to(tl.int32), 1)
    is_own = chunks[None, :] == own[:, None]
    offset = (index - tl.sum(tl.where(is_own, (ends - tiles)[None, :], 0), 1)) * BLOCK_Q
    begin = tl.sum(tl.where(is_own, begins[None, :], 0), 1)
    count = tl.sum(tl.where(is_own, counts[None, :], 0), 1)
    start = tl.sum(tl.where(is_own, starts[None, :], 0), 1)
    queries = tl.minimum(count - offset, BLOCK_Q)
    seen = start + offset + queries

    within = _num_within(seen[:, None], starts[None, :], counts[None, :], BLOCK_Q)
    fewer = _num_within(seen[:, None] - 1, starts[None, :], counts[None, :], BLOCK_Q)
    heavier = tl.sum(tiles[None, :] - within, 1)
    as_heavy = tl.sum(tl.where(chunks[None, :] < own[:, None], within - fewer, 0), 1)

    real = index < num_tiles
    padding = tl.load(query_starts_ptr + C) + (index - num_tiles) * BLOCK_Q
    record_ptr = tiles_ptr + tl.where(real, heavier + as_heavy, index) * RECORD
    mask = index < N
    tl.store(record_ptr, tl.where(real, begin + offset, padding), mask=mask)
    tl.store(record_ptr + 1, tl.where(real, queries, tl.minimum(tl.maximum(T - padding, 0), BLOCK_Q)), mask=mask)
    tl.store(record_ptr + 2, start + offset, mask=mask)
    tl.store(record_ptr + 3, tl.load(slots_ptr + own, mask=real & mask, other=0), mask=mask)
    if ends_ptr is not None:  # of a tile's queries none sees further than the last: images are not cut by chunks
        seen = tl.maximum(seen, tl.load(ends_ptr + begin + offset + queries - 1, mask=real & mask, other=0))
    tl.store(record_ptr + 4, tl.where(real, seen, 0), mask=mask)
    tl.store(record_ptr + 5, start + count, mask=mask)
    tl.store(record_ptr + 6, tl.where(real, own, 0), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(tiles_ptr + N * RECORD, num_tiles)
        padded = tl.maximum(T - tl.load(query_starts_ptr + C), 0)
        tl.store(tiles_ptr + N * RECORD + 1, num_tiles + tl.cdiv(padded, BLOCK_Q))


@triton.jit(do_not_specialize=["C"], do_not_specialize_on_alignment=["C"])
def _last_tiles_kernel(
    slots_ptr, chunk_starts_ptr, query_starts_ptr, tiles_ptr, C,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,): one program finds the last tile of each chunk; chunks of nothing come last, as padding of nothing."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    chunks = tl.arange(0, BLOCK_C)
    mask = chunks < C
    begin = tl.load(query_starts_ptr + chunks, mask=mask, other=0)
    count = tl.load(query_starts_ptr + chunks + 1, mask=mask, other=0) - begin
    start = tl.load(chunk_starts_ptr + chunks, mask=mask, other=0)
    real = mask & (count > 0)
    offset = tl.maximum(tl.cdiv(count, BLOCK_Q) - 1, 0) * BLOCK_Q
    before = tl.cumsum(real.to(tl.int32), 0) - real.to(tl.int32)
    num_tiles = tl.sum(real.to(tl.int32), 0)
    record_ptr = tiles_ptr + tl.where(real, before, num_tiles + chunks - before) * RECORD
    tl.store(record_ptr, begin + offset, mask=mask)
    tl.store(record_ptr + 1, count - offset, mask=mask)
    tl.store(record_ptr + 2, start + offset, mask=mask)
    tl.store(record_ptr + 3, tl.load(slots_ptr + chunks, mask=real, other=0), mask=mask)
    tl.store(record_ptr + 4, tl.where(real, start + count, 0), mask=mask)
    tl.store(record_ptr + 5, start + count, mask=mask)
    tl.store(record_ptr + 6, chunks, mask=mask)
    tl.store(tiles_ptr + C * RECORD, num_tiles)
    tl.store(tiles_ptr + C * RECORD + 1, num_tiles)


def plan_last_tiles(chunk_slots_C: Tensor, chunk_starts_C: Tensor, query_starts_C1: Tensor, work: PrefillWork) -> None:
    """Find the last tile of each chunk. Graph-safe: once per step, before the last layer."""
    C = chunk_slots_C.shape[0]
    _last_tiles_kernel[(1,)](
        chunk_slots_C, chunk_starts_C, query_starts_C1, work.tiles_N8, C,
        BLOCK_Q=work.block_q, BLOCK_C=max(16, next_power_of_2(C)), RECORD=RECORD, num_warps=4,
        **overlap_options(chunk_slots_C),
    )  # fmt: skip


def plan_prefill_work(
    chunk_slots_C: Tensor, chunk_starts_C: Tensor, query_starts_C1: Tensor, num_tokens: int, work: PrefillWork,
    ends_T: Tensor | None = None,
) -> None:  # fmt: skip
    """Cut a step's chunks into tiles. `ends_T`: see `prefill_attention`. Graph-safe: once per step, before the first
    layer."""
    C = chunk_slots_C.shape[0]
    block_c = next_power_of_2(max(C, 1))
    block_n = min(max(4096 // block_c, 16), 2**14 // block_c)  # beside very many chunks larger ones compile for long
    _cut_kernel[(cdiv(work.num_tiles, block_n),)](
        chunk_slots_C, chunk_starts_C, query_starts_C1, ends_T, work.tiles_N8, C, num_tokens, work.num_tiles,
        BLOCK_Q=work.block_q, BLOCK_C=block_c, BLOCK_N=block_n, RECORD=RECORD, num_warps=4,
        **overlap_options(chunk_slots_C),
    )  # fmt: skip
