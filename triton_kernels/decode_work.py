"""How decode rows are cut into splits, so that few long sequences fill a card as well as many short ones: once per
step, on the device, for the attention of all layers.

By default the length of a split follows from the work of the whole step; in deterministic mode it is fixed, so a row's
bits depend on nothing else.

Shape suffixes: B decode rows, T their queries, H q heads, or those of all queries of a row, D head size, I splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import multiprocessors
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2

_FIXED_SPLIT = 512
_SHORTEST_SPLIT = 64
_SPLITS_PER_MULTIPROCESSOR = 16
"""Over all kv heads, where there is much to read; a quarter of it where there is little."""
_MANY_ROWS = 32
"""Rows of many lengths need short splits to end together."""
_MUCH = 2**17
"""Tokens of a step."""
_SIZES = ["B", "few", "many", "fixed", "window", "capacity"]


@dataclass(frozen=True)
class DecodeWork:
    """The splits of one step's decode rows, and memory for what they leave to be merged."""

    items_I8: Tensor
    """int32 records: row (-1: none), begin, end, slot, length of the row, number of its splits."""
    counts_B: Tensor
    """Number of each row's splits."""
    starts_B: Tensor
    """Index of each row's first split."""
    num_items_1: Tensor
    partial_IHD: Tensor
    """fp32 weighted sums of values."""
    stats_IH2: Tensor
    """fp32 largest score and sum of weights."""
    fixed: bool
    """Splits of one length, whatever the rest of the step: deterministic mode."""
    window: int
    """Only of a row's last so many tokens there are splits; 0: of all."""
    tries: int = 1
    """Queries of a row: its last tokens, as far as it has so many."""
    lengths_T: Tensor | None = None
    """Of several, how many tokens each of them sees; 0: it is none."""


def make_decode_work(
    num_rows: int, num_pages: int, page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int,
    device: torch.device, *, deterministic: bool, window: int = 0, tries: int = 1, lengths_T: Tensor | None = None,
    most: int = 0,
) -> DecodeWork:  # fmt: skip
    """Memory for any step of `num_rows` decode rows that hold `num_pages` at most, a shared page counted for each.

    `window`: of the layers that it is for; `tries`, `lengths_T`: queries of a row, and what each of several sees;
    `most`: as `plan_decode_work` is told.
    """
    if deterministic:
        capacity = num_rows + num_pages * page_size // _FIXED_SPLIT
        if window:  # which begins and ends inside of one
            capacity = min(capacity, num_rows * ((window + tries - 1) // _FIXED_SPLIT + 2))
    else:
        capacity = num_rows + (most or _most_splits(num_rows, device, num_kv_heads))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DecodeWork(
        items_I8=empty(capacity, 8),
        counts_B=empty(num_rows),
        starts_B=empty(num_rows),
        num_items_1=empty(1),
        partial_IHD=empty(capacity, tries * num_q_heads, head_dim, dtype=torch.float32),
        stats_IH2=empty(capacity, tries * num_q_heads, 2, dtype=torch.float32),
        fixed=deterministic,
        window=window and window + tries - 1,  # of the first query
        tries=tries,
        lengths_T=lengths_T,
    )


def _most_splits(num_rows: int, device: torch.device, num_kv_heads: int) -> int:
    """Splits that, over all kv heads, keep every multiprocessor busy to the end. Programs without one cost too."""
    each = _SPLITS_PER_MULTIPROCESSOR if num_rows >= 8 else _SPLITS_PER_MULTIPROCESSOR // 4
    return max(4, each * multiprocessors(device) // num_kv_heads)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _work_kernel(
    lengths_ptr, slots_ptr, items_ptr, counts_ptr, starts_ptr, num_items_ptr, B, few, many, fixed, window, capacity,
    BLOCK_B: tl.constexpr, SHORTEST: tl.constexpr, MUCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,): one program cuts all rows, each into equal parts unless `fixed` says how long parts are.

    What is ahead of a row's window is left out, by whole parts if their positions are fixed.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    rows = tl.arange(0, BLOCK_B)
    lengths = tl.load(lengths_ptr + rows, mask=rows < B, other=0)
    slots = tl.load(slots_ptr + rows, mask=rows < B, other=0)
    unit = tl.where(fixed > 0, fixed, SHORTEST)
    first = tl.where(window > 0, tl.maximum(lengths - window, 0) // unit * unit, 0)
    seen = lengths - first
    total = tl.sum(seen, 0)
    # An eighth more than fits: rows of one length a little above it are not halved for nothing.
    fitting = tl.cdiv(total, tl.where(total < MUCH, few, many)) * 9 // 8
    fitting = tl.maximum(fitting, SHORTEST)
    counts = tl.cdiv(seen, tl.where(fixed > 0, fixed, fitting))
    even = tl.cdiv(tl.cdiv(seen, tl.maximum(counts, 1)), SHORTEST) * SHORTEST
    parts = tl.where(fixed > 0, fixed, even)
    counts = tl.cdiv(seen, tl.maximum(parts, 1))
    starts = tl.cumsum(counts, 0) - counts
    num_items = tl.sum(counts, 0)
    tl.store(counts_ptr + rows, counts, mask=rows < B)
    tl.store(starts_ptr + rows, starts, mask=rows < B)
    tl.store(num_items_ptr, num_items)
    for index in range(tl.max(counts, 0)):
        record_ptr = items_ptr + (starts + index) * 8
        mask = index < counts
        tl.store(record_ptr, rows, mask=mask)
        begin = first + index * parts
        tl.store(record_ptr + 1, begin, mask=mask)
        tl.store(record_ptr + 2, tl.minimum(begin + parts, lengths), mask=mask)
        tl.store(record_ptr + 3, slots, mask=mask)
        tl.store(record_ptr + 4, lengths, mask=mask)
        tl.store(record_ptr + 5, counts, mask=mask)
    if fixed == 0:
        for empty in range(num_items, capacity, BLOCK_B):
            tl.store(items_ptr + (empty + rows) * 8, -1, mask=empty + rows < capacity)


def plan_decode_work(
    decode_lengths_B: Tensor, decode_slots_B: Tensor, work: DecodeWork, num_kv_heads: int, *, most: int = 0
) -> None:
    """Cut a step's rows into splits. Graph-safe: once per step, before the first layer.

    `most`: how many there are of much, and twice as many as of little; 0: as many as go with several programs a
    multiprocessor.
    """
    B = decode_lengths_B.shape[0]
    few = max(1, most // 2)
    if not most:
        most = _most_splits(B, decode_lengths_B.device, num_kv_heads)
        few = max(1, _SPLITS_PER_MULTIPROCESSOR // 4 * multiprocessors(decode_lengths_B.device) // num_kv_heads)
    if B >= _MANY_ROWS:
        few = most
    _work_kernel[(1,)](
        decode_lengths_B, decode_slots_B, work.items_I8, work.counts_B, work.starts_B, work.num_items_1, B,
        few, most, _FIXED_SPLIT if work.fixed else 0, work.window, work.items_I8.shape[0],
        BLOCK_B=max(16, next_power_of_2(B)), SHORTEST=_SHORTEST_SPLIT, MUCH=_MUCH, num_warps=4,
        **overlap_options(decode_lengths_B),
    )  # fmt: skip
