"""How a step's few decode rows are cut up for programs that attend to one stretch of one row and kv head each.

Every pair of a row and a kv head gets workers by its length, and one program more for its newest token, or for several
where a row tries some ahead. Planned once per step, on the device, for the attention of all layers. Integers only.

Shape suffixes: B decode rows, T their tokens, W workers, G q heads of one kv head, of each token of a row, D head size,
I parts, S slots, M pages of a slot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.windows import first_tile

ROW_WORDS = 4
WORKER_WORDS = 8
_SIZES = ["B", "W", "M"]


@dataclass(frozen=True)
class FewRows:
    """What each worker does in one step, and memory for the parts that are merged."""

    rows_B4: Tensor
    """int32 records: slot, tokens in the cache (-1: the row is dead), first worker of kv head 0, workers of each."""
    workers_W8: Tensor
    """int32 records: row, kv head, slot, tokens in the row's cache, first tile, one behind the last (same: no work),
    page of the first tile."""
    part_IGD: Tensor
    """fp32 weighted sums of values: one part a worker; of several newest tokens one more, behind the workers'."""
    stats_IG2: Tensor
    """fp32 largest score and sum of weights of each part; behind the workers', the newest tokens' scores."""
    tile: int
    """Tokens of one tile."""
    window: int
    """Of a row no more than its last so many tokens are seen; 0: all."""
    tries: int
    """Newest tokens of a row, at most."""
    lengths_T: Tensor
    """Tokens of the row up to each of those; 0: it is none."""

    @property
    def num_workers(self) -> int:
        return self.workers_W8.shape[0]


def make_few_rows(
    lengths_T: Tensor, num_workers: int, num_q_heads: int, num_kv_heads: int, head_dim: int, tile: int, *,
    window: int = 0, tries: int = 1,
) -> FewRows:  # fmt: skip
    """Memory for any step of so many decode rows, of `tries` tokens each. Each pair of a row and a head may need a
    worker."""
    device, num_rows = lengths_T.device, lengths_T.shape[0] // tries
    pairs, group = num_rows * num_kv_heads, tries * num_q_heads // num_kv_heads
    num_workers = max(num_workers, 2 * pairs)
    num_parts = num_workers if tries == 1 else num_workers + pairs
    return FewRows(
        rows_B4=torch.empty(num_rows, ROW_WORDS, dtype=torch.int32, device=device),
        workers_W8=torch.empty(num_workers, WORKER_WORDS, dtype=torch.int32, device=device),
        part_IGD=torch.empty(num_parts, group, head_dim, dtype=torch.float32, device=device),
        stats_IG2=torch.empty(num_workers + pairs, group, 2, dtype=torch.float32, device=device),
        tile=tile,
        window=window,
        tries=tries,
        lengths_T=lengths_T,
    )


@triton.jit
def load_record(record_ptr):
    """Of a worker: row, kv head, slot, tokens in the row's cache, its first tile and the one behind its last."""
    row = tl.load(record_ptr).to(tl.int64)
    head = tl.load(record_ptr + 1)
    slot = tl.load(record_ptr + 2).to(tl.int64)
    known = tl.load(record_ptr + 3)
    begin = tl.load(record_ptr + 4)
    return row, head, slot, known, begin, tl.load(record_ptr + 5)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _cut_kernel(
    lengths_ptr, slots_ptr, page_table_ptr, rows_ptr, workers_ptr, B, W, M,
    BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr, TRIES: tl.constexpr, ROW_WORDS: tl.constexpr, WORKER_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (W / BLOCK_W,): one program finds the stretches of BLOCK_W workers; the first also describes the rows."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    rows = tl.arange(0, BLOCK_B)
    # The newest token is not in the cache yet, nor are those behind it.
    known = tl.load(lengths_ptr + rows * TRIES, mask=rows < B, other=0) - 1
    slots = tl.load(slots_ptr + rows, mask=rows < B, other=0)
    tiles = tl.cdiv(tl.maximum(known, 0), TILE)
    firsts = first_tile(known, TILE, WINDOW)
    tiles -= firsts
    # Tiles of a stretch: an equal share, unless the last and shorter stretches of the pairs make too many of them.
    total = tl.sum(tiles, 0) * KV_HEADS
    even = tl.maximum(tl.cdiv(total, W), 1)
    fits = tl.sum(tl.cdiv(tiles, even), 0) * KV_HEADS <= W
    each = tl.where(fits, even, tl.cdiv(total, W - B * KV_HEADS))
    counts = tl.cdiv(tiles, each)
    ends = tl.cumsum(counts, 0) * KV_HEADS
    if tl.program_id(0) == 0:
        record_ptr = rows_ptr + rows * ROW_WORDS
        tl.store(record_ptr, slots, mask=rows < B)
        tl.store(record_ptr + 1, known, mask=rows < B)
        tl.store(record_ptr + 2, ends - counts * KV_HEADS, mask=rows < B)
        tl.store(record_ptr + 3, counts, mask=rows < B)

    worker = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.sum((ends[None, :] <= worker[:, None]).to(tl.int32), 1)
    is_own = rows[None, :] == row[:, None]
    own_known = tl.sum(tl.where(is_own, known[None, :], 0), 1)
    own_tiles = tl.sum(tl.where(is_own, tiles[None, :], 0), 1)
    own_slot = tl.sum(tl.where(is_own, slots[None, :], 0), 1)
    count = tl.maximum(tl.sum(tl.where(is_own, counts[None, :], 0), 1), 1)
    within = worker - tl.sum(tl.where(is_own, (ends - counts * KV_HEADS)[None, :], 0), 1)
    stretch = within % count
    # As even as can be. Who belongs to no row has none of its tiles.
    begin = stretch * (own_tiles // count) + tl.minimum(stretch, own_tiles % count)
    if WINDOW > 0:
        begin += tl.sum(tl.where(is_own, firsts[None, :], 0), 1)
    end = begin + own_tiles // count + (stretch < own_tiles % count).to(tl.int32)
    page_ptr = page_table_ptr + own_slot.to(tl.int64) * M + tl.minimum(begin * TILE // PAGE, M - 1)
    record_ptr = workers_ptr + worker * WORKER_WORDS
    mask = worker < W
    tl.store(record_ptr, row, mask=mask)
    tl.store(record_ptr + 1, within // count, mask=mask)
    tl.store(record_ptr + 2, own_slot, mask=mask)
    tl.store(record_ptr + 3, own_known, mask=mask)
    tl.store(record_ptr + 4, begin, mask=mask)
    tl.store(record_ptr + 5, end, mask=mask)
    tl.store(record_ptr + 6, tl.load(page_ptr, mask=begin < end, other=0), mask=mask)


def plan_few_rows(
    decode_slots_B: Tensor, page_table_SM: Tensor, few: FewRows, page_size: int, num_kv_heads: int
) -> None:
    """Cut a step's decode rows up. Graph-safe: once per step, before the first layer."""
    B, W = decode_slots_B.shape[0], few.num_workers
    block_w = 64
    _cut_kernel[(cdiv(W, block_w),)](
        few.lengths_T, decode_slots_B, page_table_SM, few.rows_B4, few.workers_W8, B, W, page_table_SM.shape[1],
        BLOCK_B=next_power_of_2(B), BLOCK_W=block_w, TILE=few.tile, PAGE=page_size, KV_HEADS=num_kv_heads,
        WINDOW=few.window, TRIES=few.tries, ROW_WORDS=ROW_WORDS, WORKER_WORDS=WORKER_WORDS, num_warps=2,
        **overlap_options(decode_slots_B),
    )  # fmt: skip
