"""Merges what the workers of decode attention leave of a row and head whose tiles a border cut.

Shape suffixes: G q heads of one kv head, D head size, I parts.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.overlap import let_next_start, wait_for_previous


@triton.jit
def add_parts(acc, largest, weight, sums_ID, own_I, weights_I):
    """Parts of one head, each relative to its own largest score, added to what there is of it."""
    new = tl.maximum(largest, tl.max(own_I, 0))
    factors = tl.exp2(own_I - new)
    shrink = tl.exp2(largest - new)
    weight = weight * shrink + tl.sum(weights_I * factors, 0)
    return acc * shrink + tl.sum(sums_ID * factors[:, None], 0), new, weight


@triton.jit
def add_all_parts(
    acc, largest, weight, part_ptrs, stats_ptrs, count, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_I: tl.constexpr
):
    """A head's `count` parts added, in order, BLOCK_I at a time. Pointers: of the first, BLOCK_I and [BLOCK_I, D]; a
    part has QUERIES."""
    parts = tl.arange(0, BLOCK_I)
    for begin in range(0, count, BLOCK_I):
        inside = parts < count - begin
        own = tl.load(stats_ptrs, mask=inside, other=float("-inf"))
        weights = tl.load(stats_ptrs + 1, mask=inside, other=0.0)
        sums = tl.load(part_ptrs, mask=inside[:, None], other=0.0)
        acc, largest, weight = add_parts(acc, largest, weight, sums, own, weights)
        part_ptrs += BLOCK_I * QUERIES * D
        stats_ptrs += BLOCK_I * QUERIES * 2
    return acc, largest, weight


@triton.jit
def merge_parts_kernel(
    workers_ptr, part_ptr, stats_ptr, out_ptr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_I: tl.constexpr, WORKER_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (workers, G): one program merges, in order, the parts of one head of the pair that its worker leads."""
    let_next_start(PDL)
    worker = tl.program_id(0)
    record_ptr = workers_ptr + worker * WORKER_WORDS
    num_parts = tl.load(record_ptr + 8)
    # Most have nothing to do and make room; but not all: the next kernel would find this one at its end too soon.
    if (num_parts > 0) | (worker == 0):
        row = tl.load(record_ptr + 5).to(tl.int64)
        head = tl.load(record_ptr + 6) * G + tl.program_id(1)
        first = tl.load(record_ptr + 7)
        wait_for_previous(PDL)
        columns = tl.arange(0, D)
        largest = float("-inf")
        weight = 0.0
        acc = tl.zeros((D,), tl.float32)
        for begin in range(0, num_parts, BLOCK_I):
            parts = begin + tl.arange(0, BLOCK_I)
            # Behind the leader's own part each worker has one, the first of its two.
            places = tl.where(parts == 0, first, (worker + parts) * 2) * G + tl.program_id(1)
            inside = parts < num_parts
            own = tl.load(stats_ptr + places * 2, mask=inside, other=float("-inf"))
            weights = tl.load(stats_ptr + places * 2 + 1, mask=inside, other=0.0)
            sums = tl.load(part_ptr + places[:, None] * D + columns[None, :], mask=inside[:, None], other=0.0)
            acc, largest, weight = add_parts(acc, largest, weight, sums, own, weights)
        y = acc / tl.where(weight > 0, weight, 1.0)
        tl.store(out_ptr + (row * H + head) * D + columns, y.to(out_ptr.dtype.element_ty), mask=columns < D * num_parts)
