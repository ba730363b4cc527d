"""How a step's decode rows are cut so that a row's bits depend on nothing else: at fixed positions.

Each row's tokens in the cache are cut into splits of one length, the last one shorter. A worker takes every W-th pair
of a split and a kv head, whole; long splits come first, so that all workers end at nearly the same time. What splits of
a row leave is merged in their order. Planned once per step, on the device, for the attention of all layers.

Shape suffixes: B decode rows, W workers, H q heads, D head size, I splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.windows import first_tile, most_tiles

SPLIT_WORDS = 4
_SIZES = ["B"]


@dataclass(frozen=True)
class FixedSplits:
    """The splits of one step, and memory for what they leave."""

    splits_I4: Tensor
    """int32 records: row, slot, tokens of the row in the cache, the tile behind the split's last."""
    num_splits_1: Tensor
    counts_B: Tensor
    """Number of each row's splits; 0 for rows that are dead."""
    starts_B: Tensor
    """Where each row's parts begin: one for each split, in their order."""
    lengths_B: Tensor
    part_IHD: Tensor
    """fp32 weighted sums of values."""
    stats_IH2: Tensor
    """fp32 largest score and sum of weights."""
    num_workers: int
    tile: int
    """Tokens of one tile."""
    split: int
    """Tiles of one split."""
    window: int
    """Of a row no more than its last so many tokens are seen, which moves no cut; 0: all."""


def make_fixed_splits(
    decode_lengths_B: Tensor, max_tokens: int, num_workers: int, num_q_heads: int, head_dim: int, tile: int, split: int,
    *, window: int = 0,
) -> FixedSplits:  # fmt: skip
    """Memory for any step of so many decode rows of up to `max_tokens` each."""
    device, num_rows = decode_lengths_B.device, decode_lengths_B.shape[0]
    capacity = num_rows * most_tiles(max_tokens, tile * split, window)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return FixedSplits(
        splits_I4=empty(capacity, SPLIT_WORDS),
        num_splits_1=empty(1),
        counts_B=empty(num_rows),
        starts_B=empty(num_rows),
        lengths_B=decode_lengths_B,
        part_IHD=empty(capacity, num_q_heads, head_dim, dtype=torch.float32),
        stats_IH2=empty(capacity, num_q_heads, 2, dtype=torch.float32),
        num_workers=num_workers,
        tile=tile,
        split=split,
        window=window,
    )


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _fixed_splits_kernel(
    lengths_ptr, slots_ptr, splits_ptr, num_splits_ptr, counts_ptr, starts_ptr, B,
    BLOCK_B: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SPLIT_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,): one program cuts all rows."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    rows = tl.arange(0, BLOCK_B)
    lengths = tl.load(lengths_ptr + rows, mask=rows < B, other=0)
    slots = tl.load(slots_ptr + rows, mask=rows < B, other=0)
    # The newest token is not in the cache yet. A row without any other has a tile all the same, of nothing.
    tiles = tl.where(lengths > 0, tl.maximum(tl.cdiv(lengths - 1, TILE), 1), 0)
    # Splits of which nothing is seen are none. One that the window cuts counts as long.
    firsts = first_tile(lengths - 1, TILE, WINDOW) // SPLIT
    long = tiles // SPLIT - firsts
    short = (tiles % SPLIT > 0).to(tl.int32)
    long_before = tl.cumsum(long, 0) - long
    short_before = tl.cumsum(short, 0) - short
    num_long = tl.sum(long, 0)
    tl.store(num_splits_ptr, num_long + tl.sum(short, 0))
    tl.store(counts_ptr + rows, long + short, mask=rows < B)
    tl.store(starts_ptr + rows, long_before + short_before, mask=rows < B)
    record_ptr = splits_ptr + (num_long + short_before) * SPLIT_WORDS
    tl.store(record_ptr, rows, mask=short > 0)
    tl.store(record_ptr + 1, slots, mask=short > 0)
    tl.store(record_ptr + 2, lengths - 1, mask=short > 0)
    tl.store(record_ptr + 3, tiles, mask=short > 0)
    for index in range(tl.max(long, 0)):
        record_ptr = splits_ptr + (long_before + index) * SPLIT_WORDS
        tl.store(record_ptr, rows, mask=index < long)
        tl.store(record_ptr + 1, slots, mask=index < long)
        tl.store(record_ptr + 2, lengths - 1, mask=index < long)
        tl.store(record_ptr + 3, (firsts + index + 1) * SPLIT, mask=index < long)


def plan_fixed_splits(decode_slots_B: Tensor, splits: FixedSplits) -> None:
    """Cut a step's decode rows. Graph-safe: once per step, before the first layer."""
    B = decode_slots_B.shape[0]
    _fixed_splits_kernel[(1,)](
        splits.lengths_B, decode_slots_B, splits.splits_I4, splits.num_splits_1, splits.counts_B, splits.starts_B, B,
        BLOCK_B=max(16, next_power_of_2(B)), TILE=splits.tile, SPLIT=splits.split, WINDOW=splits.window,
        SPLIT_WORDS=SPLIT_WORDS, num_warps=4, **overlap_options(decode_slots_B),
    )  # fmt: skip
