"""Decode attention in Triton: one query a sequence over its paged keys and values.

Each sequence is cut into splits, so that few long sequences fill the card as well as many short ones. A small kernel
cuts them once per step, on the device, for all layers (`plan_decode_work`); a fixed number of programs then works the
list of splits off, and a last kernel merges the splits of a sequence in their order. By default the length of a split
follows from the work of the whole step; in deterministic mode it is fixed, so a row's bits depend on nothing else.

Shape suffixes: B decode rows, H q heads, G q heads of one kv head, D head size, S slots, M pages of a slot, I splits;
caches are [page, kv head, token of the page, D].
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.cells import as_factor
from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.merge_splits import merge_splits
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.sinks import begin_with_sinks
from tercet.triton_kernels.tiles import dot_block, next_power_of_2

_FIXED_SPLIT = 512
_SHORTEST_SPLIT = 64
_PROGRAMS_PER_MULTIPROCESSOR = 4
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


def make_decode_work(
    num_rows: int, num_pages: int, page_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int,
    device: torch.device, *, deterministic: bool, window: int = 0,
) -> DecodeWork:  # fmt: skip
    """Memory for any step of `num_rows` decode rows that hold `num_pages` at most, a shared page counted for each.

    `window`: of the layers that it is for.
    """
    if deterministic:
        capacity = num_rows + num_pages * page_size // _FIXED_SPLIT
    else:
        capacity = num_rows + _most_splits(num_rows, device, num_kv_heads)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DecodeWork(
        items_I8=empty(capacity, 8),
        counts_B=empty(num_rows),
        starts_B=empty(num_rows),
        num_items_1=empty(1),
        partial_IHD=empty(capacity, num_q_heads, head_dim, dtype=torch.float32),
        stats_IH2=empty(capacity, num_q_heads, 2, dtype=torch.float32),
        fixed=deterministic,
        window=window,
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


def plan_decode_work(decode_lengths_B: Tensor, decode_slots_B: Tensor, work: DecodeWork, num_kv_heads: int) -> None:
    """Cut a step's rows into splits. Graph-safe: once per step, before the first layer."""
    B = decode_lengths_B.shape[0]
    most = _most_splits(B, decode_lengths_B.device, num_kv_heads)
    few = (
        most
        if B >= _MANY_ROWS
        else max(1, _SPLITS_PER_MULTIPROCESSOR // 4 * multiprocessors(decode_lengths_B.device) // num_kv_heads)
    )
    _work_kernel[(1,)](
        decode_lengths_B, decode_slots_B, work.items_I8, work.counts_B, work.starts_B, work.num_items_1, B,
        few, most, _FIXED_SPLIT if work.fixed else 0, work.window, work.items_I8.shape[0],
        BLOCK_B=max(16, next_power_of_2(B)), SHORTEST=_SHORTEST_SPLIT, MUCH=_MUCH, num_warps=4,
        **overlap_options(decode_lengths_B),
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "num_programs"], do_not_specialize_on_alignment=["M", "num_programs"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, page_table_ptr, items_ptr, num_items_ptr, slopes_ptr, sinks_ptr, partial_ptr, stats_ptr,
    out_ptr, scale, softcap, M, num_programs,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, PERSISTENT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (num_programs,): each program takes one pair of a split and a kv head, or every num_programs-th one.

    A split's q heads are the rows of the dot products. Scores are in units of log 2.
    """
    G: tl.constexpr = H // KV_HEADS
    let_next_start(PDL)
    wait_for_previous(PDL)
    heads = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, TILE)
    column_mask = columns < D
    first_pair = tl.program_id(0)
    end_pair = first_pair + 1
    if PERSISTENT:
        end_pair = tl.load(num_items_ptr) * KV_HEADS
    for pair in range(first_pair, end_pair, num_programs):
        item = pair // KV_HEADS
        kv_head = pair % KV_HEADS
        row = tl.load(items_ptr + item * 8)
        begin = tl.load(items_ptr + item * 8 + 1)
        end = tl.load(items_ptr + item * 8 + 2)
        slot = tl.load(items_ptr + item * 8 + 3)
        length = tl.load(items_ptr + item * 8 + 4)
        count = tl.load(items_ptr + item * 8 + 5)
        if row < 0:
            begin = 0
            end = 0
            slot = 0
        first = begin
        if WINDOW > 0:
            first = tl.maximum(begin, (length - WINDOW) // TILE * TILE)
        pages_ptr = page_table_ptr + slot.to(tl.int64) * M
        q_heads = kv_head * G + heads
        q_mask = (heads < G)[:, None] & column_mask[None, :] & (row >= 0)
        q = tl.load(q_ptr + (row * H + q_heads)[:, None] * D + columns[None, :], mask=q_mask, other=0.0)
        q = as_factor(q, q.dtype, k_ptr.dtype.element_ty)
        largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_G,), tl.float32)
        if SINKS:
            # Of a row's splits the last counts them.
            largest, weight = begin_with_sinks(sinks_ptr, q_heads, (heads < G) & (end == length))
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
            cells = (page * KV_HEADS + kv_head) * PAGE + start % PAGE + tokens
            offsets = cells[:, None] * D + columns[None, :]
            if D == BLOCK_D:
                k = tl.load(k_ptr + offsets)
                v = tl.load(v_ptr + offsets)
            else:
                k = tl.load(k_ptr + offsets, mask=column_mask[None, :], other=0.0)
                v = tl.load(v_ptr + offsets, mask=column_mask[None, :], other=0.0)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
            positions = start + tokens
            inside = positions < end
            if WINDOW > 0:
                inside &= positions >= length - WINDOW
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if SOFTCAP:
                scores = softcap * (1 - 2 / (tl.exp2(2 * 1.4426950408889634 * scores / softcap) + 1))
            if ALIBI:
                slopes = tl.load(slopes_ptr + q_heads, mask=heads < G, other=0.0)
                scores += slopes[:, None] * (positions - (length - 1)).to(tl.float32)[None, :]
            scores = tl.where(inside[None, :], scores * 1.4426950408889634, float("-inf"))
            # Cells beyond the end may hold anything, NaN too.
            v = tl.where(inside[:, None], v, 0.0)
            new = tl.maximum(largest, tl.max(scores, 1))
            finite = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - finite[:, None])
            rescale = tl.exp2(largest - finite)
            weight = weight * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            largest = new
        if count == 1:
            y = acc / weight[:, None]
            out_ptrs = out_ptr + (row * H + q_heads)[:, None] * D + columns[None, :]
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            place = item.to(tl.int64) * H + q_heads
            stats_mask = (heads < G) & (row >= 0)
            tl.store(partial_ptr + place[:, None] * D + columns[None, :], acc, mask=q_mask)
            tl.store(stats_ptr + place * 2, largest, mask=stats_mask)
            tl.store(stats_ptr + place * 2 + 1, weight, mask=stats_mask)


def launch_decode_attention(
    q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, scoring: Scoring, work: DecodeWork,
    out_BHD: Tensor,
) -> None:  # fmt: skip
    """Two launches: the splits, and their merge. Graph-safe; `work` is planned."""
    if work.window not in (0, scoring.window):
        raise ValueError(f"work: got what is planned for a window of {work.window}, wanted {scoring.window}")
    _, H, D = q_BHD.shape
    kv_heads, page_size = k_cache.shape[1:3]
    tile = 64 if q_BHD.dtype.itemsize == 2 else 32
    if D > 128 and not is_hopper(q_BHD.device):
        tile //= 2  # others have less shared memory
    # Fixed splits may be very many: then programs take several. Else the card hands pairs to whoever is free.
    num_programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q_BHD.device)
    if not work.fixed:
        num_programs = work.items_I8.shape[0] * kv_heads
    overlap = overlap_options(q_BHD)
    slopes, sinks = scoring.alibi_slopes_H, scoring.sinks_H
    _decode_kernel[(num_programs,)](
        q_BHD, k_cache, v_cache, page_table_SM, work.items_I8, work.num_items_1,
        q_BHD if slopes is None else slopes, q_BHD if sinks is None else sinks,
        work.partial_IHD, work.stats_IH2, out_BHD,
        scoring.scale, scoring.softcap, page_table_SM.shape[1], num_programs,
        H=H, KV_HEADS=kv_heads, D=D, PAGE=page_size, TILE=min(page_size, tile),
        BLOCK_G=dot_block(H // kv_heads), BLOCK_D=dot_block(D),
        PERSISTENT=work.fixed, WINDOW=scoring.window, SOFTCAP=bool(scoring.softcap),
        ALIBI=slopes is not None, SINKS=sinks is not None,
        PRECISION="ieee" if q_BHD.dtype == torch.float32 else "tf32", STAGES=3, num_warps=2, **overlap,
    )  # fmt: skip
    merge_splits(work.counts_B, work.starts_B, work.partial_IHD, work.stats_IH2, out_BHD)
