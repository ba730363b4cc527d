"""How a step's decode rows are shared among workers that stream their keys and values.

The tiles of all rows and kv heads lie in one line, and each worker gets an equal stretch of it: nobody is idle before
the others, whatever the rows' lengths. Where a border cuts the tiles of a row and head, their workers leave parts that
are merged in order. Planned once per step, on the device, for the attention of all layers. Integers only.

Shape suffixes: B decode rows, W workers, H q heads, G q heads of one kv head, D head size, I parts.
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
WORKER_WORDS = 12
EXTRA_PLACES = 4
"""What beginning with a row and head costs, in tiles: short rows have more of it."""
_FEWEST_PLACES = 2
"""A worker with less to do than this costs more in merging than it saves."""
_SIZES = ["B", "W"]


@dataclass(frozen=True)
class DecodeShares:
    """What each worker does in one step, and memory for the parts that are merged."""

    rows_B4: Tensor
    """int32 records of the rows that are alive, in order: row, slot, tokens in the cache, one behind the last tile of a
    head. One more, since whoever is at the last row looks for the next."""
    workers_WN: Tensor
    """int32 records: index of the first row, kv head, tile, number of row-head pairs, number of tiles; of the pair that
    begins in the stretch and ends beyond: row, kv head, its first part, number of parts (0: there is none)."""
    lengths_B: Tensor
    part_IGD: Tensor
    """fp32 weighted sums of values: two parts a worker, its first and its last."""
    stats_IG2: Tensor
    """fp32 largest score and sum of weights."""
    tile: int
    """Tokens of one tile."""
    window: int
    """Of a row no more than its last so many tokens are seen; 0: all."""

    @property
    def num_workers(self) -> int:
        return self.workers_WN.shape[0]


def make_decode_shares(
    decode_lengths_B: Tensor, num_workers: int, num_q_heads: int, num_kv_heads: int, head_dim: int, tile: int, *,
    window: int = 0,
) -> DecodeShares:  # fmt: skip
    """Memory for any step of so many decode rows."""
    device, group = decode_lengths_B.device, num_q_heads // num_kv_heads
    return DecodeShares(
        rows_B4=torch.empty(decode_lengths_B.shape[0] + 1, ROW_WORDS, dtype=torch.int32, device=device),
        workers_WN=torch.empty(num_workers, WORKER_WORDS, dtype=torch.int32, device=device),
        lengths_B=decode_lengths_B,
        part_IGD=torch.empty(2 * num_workers, group, head_dim, dtype=torch.float32, device=device),
        stats_IG2=torch.empty(2 * num_workers, group, 2, dtype=torch.float32, device=device),
        tile=tile,
        window=window,
    )


@triton.jit
def _find(at, ends, tiles, alive, KV_HEADS: tl.constexpr, EXTRA: tl.constexpr):
    """Of some places in the line: index of the row among those alive, the row, its tiles, kv head, place in the pair,
    and how many tiles are before the place."""
    is_before = ends[None, :] <= at[:, None]
    index = tl.sum((is_before & alive[None, :]).to(tl.int32), 1)
    # The first row that ends beyond: those before it are counted, the dead among them too.
    row = tl.sum(is_before.to(tl.int32), 1)
    is_own = tl.arange(0, ends.shape[0])[None, :] == row[:, None]
    own = tl.sum(tl.where(is_own, tiles[None, :], 0), 1)
    lengths = tl.where(alive, tiles + EXTRA, 0) * KV_HEADS
    within = at - tl.sum(tl.where(is_own, (ends - lengths)[None, :], 0), 1)
    head = within // (own + EXTRA)
    place = within % (own + EXTRA)
    before = tl.sum(tl.where(is_before, tiles[None, :], 0), 1) * KV_HEADS + head * own + tl.maximum(place - EXTRA, 0)
    return index, row, own, head, place, before


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _share_kernel(
    lengths_ptr, slots_ptr, rows_ptr, workers_ptr, B, W,
    BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, FEWEST: tl.constexpr,
    EXTRA: tl.constexpr, WINDOW: tl.constexpr, ROW_WORDS: tl.constexpr, WORKER_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (W / BLOCK_W,): one program finds the stretches of BLOCK_W workers; the first also lists the rows.

    In the line each pair of a row and a head takes EXTRA places ahead of its tiles.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    rows = tl.arange(0, BLOCK_B)
    lengths = tl.load(lengths_ptr + rows, mask=rows < B, other=0)
    alive = lengths > 0
    # The newest token is not in the cache yet. A row without any other has a tile all the same, of nothing.
    stops = tl.where(alive, tl.maximum(tl.cdiv(lengths - 1, TILE), 1), 0)
    firsts = first_tile(lengths - 1, TILE, WINDOW)
    tiles = stops - firsts
    places = tl.where(alive, tiles + EXTRA, 0) * KV_HEADS
    ends = tl.cumsum(places, 0)
    total = tl.sum(places, 0)
    if tl.program_id(0) == 0:
        record_ptr = rows_ptr + (tl.cumsum(alive.to(tl.int32), 0) - 1) * ROW_WORDS
        tl.store(record_ptr, rows, mask=alive)
        tl.store(record_ptr + 1, tl.load(slots_ptr + rows, mask=alive, other=0), mask=alive)
        tl.store(record_ptr + 2, lengths - 1, mask=alive)
        tl.store(record_ptr + 3, stops, mask=alive)

    worker = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    used = tl.minimum(tl.maximum(total // FEWEST, 1), W)
    each = total // used
    more = total % used
    begin = worker * each + tl.minimum(worker, more)
    end = begin + each + (worker < more).to(tl.int32)
    index, row, _, head, place, before = _find(begin, ends, tiles, alive, KV_HEADS, EXTRA)
    last_index, last_row, last_own, last_head, last_place, last_before = _find(
        end - 1, ends, tiles, alive, KV_HEADS, EXTRA
    )
    tile = tl.maximum(place - EXTRA, 0)
    if WINDOW > 0:
        tile += tl.sum(tl.where(rows[None, :] == row[:, None], firsts[None, :], 0), 1)
    # A stretch that ends among a pair's extra places has none of its tiles.
    has_last = last_place >= EXTRA
    count = last_before + has_last.to(tl.int32) - before
    busy = (worker < used) & (count > 0)
    later_pairs = (last_index - index) * KV_HEADS + last_head - head
    pairs = later_pairs + has_last.to(tl.int32)

    pair_begin = end - 1 - last_place
    pair_last = pair_begin + EXTRA + last_own - 1
    leads = busy & has_last & (pair_last >= end) & (pair_begin + EXTRA >= begin)
    wide = more * (each + 1)
    narrow = more + (pair_last - wide) // tl.maximum(each, 1)
    last_worker = tl.where(pair_last < wide, pair_last // (each + 1), narrow)

    record_ptr = workers_ptr + worker * WORKER_WORDS
    mask = worker < W
    tl.store(record_ptr, index, mask=mask)
    tl.store(record_ptr + 1, head, mask=mask)
    tl.store(record_ptr + 2, tile, mask=mask)
    tl.store(record_ptr + 3, tl.where(busy, pairs, 0), mask=mask)
    tl.store(record_ptr + 4, tl.where(busy, count, 0), mask=mask)
    tl.store(record_ptr + 5, last_row, mask=mask)
    tl.store(record_ptr + 6, last_head, mask=mask)
    tl.store(record_ptr + 7, worker * 2 + (later_pairs > 0).to(tl.int32), mask=mask)
    tl.store(record_ptr + 8, tl.where(leads, last_worker - worker + 1, 0), mask=mask)


def plan_decode_shares(decode_slots_B: Tensor, shares: DecodeShares, num_kv_heads: int) -> None:
    """Share out a step's decode rows. Graph-safe: once per step, before the first layer."""
    B, W = decode_slots_B.shape[0], shares.num_workers
    block_b = max(16, next_power_of_2(B))
    # Small programs: each searches for all its workers at once. Beside very many rows larger ones compile for long.
    block_w = min(max(16, 1024 // block_b), 2**14 // block_b)
    _share_kernel[(cdiv(W, block_w),)](
        shares.lengths_B, decode_slots_B, shares.rows_B4, shares.workers_WN, B, W,
        BLOCK_B=block_b, BLOCK_W=block_w, TILE=shares.tile, KV_HEADS=num_kv_heads, FEWEST=_FEWEST_PLACES,
        EXTRA=EXTRA_PLACES, WINDOW=shares.window, ROW_WORDS=ROW_WORDS, WORKER_WORDS=WORKER_WORDS, num_warps=4,
        **overlap_options(decode_slots_B),
    )  # fmt: skip
