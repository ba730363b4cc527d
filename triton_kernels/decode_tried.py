"""Decode attention for few slots that try several tokens each, from a layer's q, k, v rows to attended heads.

As `decode_few.py` does it for one token: keys and values of old tokens, which are read once for all tokens of a slot,
are in registers before the kernel ahead has ended, and a slot's newest tokens, with the write to the cache, are the
business of programs of their own. What each of those tokens sees of the others is one more part to be merged.

Shape suffixes: N tokens of a slot, T tokens of a tile or a step, G q heads of one kv head, C = N G queries of a slot
and kv head, those of a token behind each other, D head size, two halves of which turn together, I parts; a row's heads
are q heads, then k heads, then v heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.few_rows import ROW_WORDS, WORKER_WORDS, FewRows, load_record
from tercet.triton_kernels.few_tiles import (
    attend_to_tile,
    hold,
    leave_part,
    load_norms,
    load_queries,
    load_tile,
    load_turns,
    pages_of,
    turn_heads,
)
from tercet.triton_kernels.merge_parts import add_all_parts
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.partial_prologue import partner
from tercet.triton_kernels.sinks import load_sinks
from tercet.triton_kernels.tiles import dot_block, next_power_of_2
from tercet.triton_kernels.windows import first_seen

_NUM_WARPS = 4
_MERGED_PARTS, _MERGED_COLUMNS = 32, 32
"""What one program merges at once."""
_MERGE_WARPS = 1
_LOG2_E = tl.constexpr(1.4426950408889634)
_SIZES = ["B", "M", "P", "num_pages", "num_workers"]


@triton.jit
def _turns_at(cos_sin_ptr, positions, P, D: tl.constexpr, R: tl.constexpr):
    """Cosines and sines of some positions."""
    places = tl.minimum(positions, P - 1).to(tl.int64) * R
    return load_turns(cos_sin_ptr + places[:, None], tl.arange(0, D // 2)[None, :], D // 2, R)


@triton.jit
def _attend_to_newest(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, k_ptr, v_ptr, page_table_ptr, rows_ptr, lengths_ptr,
    part_ptr, stats_ptr, eps, unit, M, P, num_pages, num_workers,
    H: tl.constexpr, KV_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, WINDOW: tl.constexpr, ROW_WORDS: tl.constexpr,
    NORM: tl.constexpr, NORM_VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A slot's newest tokens and one kv head: their keys and values into the cache, and what they see of each other."""
    HALF: tl.constexpr = D // 2
    G: tl.constexpr = H // KV_HEADS
    cell: tl.constexpr = k_ptr.dtype.element_ty
    index = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    slot = tl.load(rows_ptr + index * ROW_WORDS).to(tl.int64)
    known = tl.load(rows_ptr + index * ROW_WORDS + 1)
    tokens = tl.arange(0, BLOCK_N)
    # Fewer may be tried than there is room for: the others are no tokens, and what is in their rows is anything.
    tried = tl.load(lengths_ptr + index * N + tokens, mask=tokens < N, other=0) > 0
    columns = tl.arange(0, HALF)
    numbers = tl.arange(0, D)
    own = tl.arange(0, BLOCK_C) // G
    at = tl.maximum(known, 0) + tokens
    pages = tl.load(page_table_ptr + slot * M + tl.minimum(at // PAGE, M - 1)).to(tl.int64)
    turn = known
    if shifts_ptr is not None:
        turn += tl.load(shifts_ptr + slot)
    turn = tl.maximum(turn, 0)
    k_cos, k_sin = _turns_at(cos_sin_ptr, turn + tokens, P, D, R)
    q_cos, q_sin = _turns_at(cos_sin_ptr, turn + own, P, D, R)
    q_norm0, q_norm1, q_norm2 = load_norms(q_norm_ptr, columns, HALF, R)
    k_norm0, k_norm1, k_norm2 = load_norms(k_norm_ptr, columns, HALF, R)
    wait_for_previous(PDL)
    if known >= 0:
        first_ptr = qkv_ptr + index * (N * ROW)
        key_ptrs = first_ptr + (H + head) * D + tokens[:, None] * ROW
        k_ptrs = key_ptrs + columns[None, :]
        v_ptrs = first_ptr + (H + KV_HEADS + head) * D + tokens[:, None] * ROW + numbers[None, :]
        k0 = tl.load(k_ptrs, mask=tried[:, None], other=0.0).to(tl.float32)
        k1 = tl.load(k_ptrs + HALF, mask=tried[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptrs, mask=tried[:, None], other=0.0)
        partners = k0
        if R < D:
            turning = tried[:, None] & (columns < R)[None, :]
            partners = tl.load(key_ptrs + partner(columns, R)[None, :], mask=turning, other=0.0).to(tl.float32)
        q0, q1 = load_queries(
            first_ptr + head * (G * D), q_norm0, q_norm1, q_norm2, q_cos, q_sin, eps, G, ROW, N * G, BLOCK_C, HALF, R,
            NORM, cell,
        )  # fmt: skip
        v = hold(v, PDL)  # or the compiler waits for it before it asks for queries
        if NORM_VALUES:
            v = v.to(tl.float32)
            v *= tl.rsqrt(tl.sum(v * v, 1)[:, None] / D + eps)
        v = v.to(cell)
        squares = tl.sum(k0 * k0 + k1 * k1, 1)[:, None]
        k0, k1 = turn_heads(
            k0, k1, partners, squares, k_norm0[None, :], k_norm1[None, :], k_norm2[None, :], k_cos, k_sin, eps, HALF, R,
            NORM,
        )  # fmt: skip
        key0 = k0.to(cell)
        key1 = k1.to(cell)
        places = (((pages * KV_HEADS + head) * PAGE + at % PAGE) * D)[:, None]
        # The first page belongs to nobody.
        inside = (tried & (pages > 0) & (pages < num_pages))[:, None]
        tl.store(k_ptr + places + columns[None, :], key0, mask=inside)
        tl.store(k_ptr + places + HALF + columns[None, :], key1, mask=inside)
        tl.store(v_ptr + places + numbers[None, :], v, mask=inside)
        seen = tried[:, None] & (tokens[:, None] <= own[None, :])
        if WINDOW > 0:
            seen &= own[None, :] - tokens[:, None] < WINDOW
        largest = tl.full((BLOCK_C,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_C,), tl.float32)
        acc = tl.zeros((D, BLOCK_C), tl.float32)
        # Each sees itself; those that are no tokens may come to anything.
        acc, largest, weight = attend_to_tile(q0, q1, key0, key1, v, seen, acc, largest, weight, unit, False)
        leave_part(part_ptr, stats_ptr, num_workers + tl.program_id(0), acc, largest, weight, N * G, BLOCK_C, D)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def tried_rows_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, k_ptr, v_ptr, page_table_ptr, rows_ptr, workers_ptr,
    lengths_ptr, part_ptr, stats_ptr, eps, scale, B, M, P, num_pages, num_workers,
    H: tl.constexpr, KV_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, WINDOW: tl.constexpr,
    ROW_WORDS: tl.constexpr, WORKER_WORDS: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B KV_HEADS + num_workers,): newest tokens, then stretches of old ones; each leaves a part to be merged.

    Who waits, and what is read before, is as in `few_rows_kernel`.
    """
    HALF: tl.constexpr = D // 2
    G: tl.constexpr = H // KV_HEADS
    unit = scale * _LOG2_E
    let_next_start(PDL)
    worker = tl.program_id(0) - B * KV_HEADS
    if worker < 0:
        _attend_to_newest(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, k_ptr, v_ptr, page_table_ptr, rows_ptr,
            lengths_ptr, part_ptr, stats_ptr, eps, unit, M, P, num_pages, num_workers, H, KV_HEADS, ROW, D, R, PAGE, N,
            BLOCK_N, BLOCK_C, WINDOW, ROW_WORDS, NORM, NORM_VALUES, PDL,
        )  # fmt: skip
        return
    record_ptr = workers_ptr + worker * WORKER_WORDS
    index, head, slot, known, begin, end = load_record(record_ptr)
    if begin == end:
        return
    table_ptr = page_table_ptr + slot * M
    pages = tl.load(record_ptr + 6) if PAGE % TILE == 0 else pages_of(table_ptr, begin * TILE, M, PAGE, TILE)
    tokens = tl.arange(0, TILE)
    columns = tl.arange(0, HALF)
    own = known + tl.arange(0, BLOCK_C) // G
    turn = own
    if shifts_ptr is not None:
        turn += tl.load(shifts_ptr + slot)
    first_ptr = qkv_ptr + index * (N * ROW) + head * (G * D)
    largest = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_C,), tl.float32)
    acc = tl.zeros((D, BLOCK_C), tl.float32)
    for tile in tl.range(begin, end, num_stages=1):
        cos, sin = _turns_at(cos_sin_ptr, turn, P, D, R)
        norm0, norm1, norm2 = load_norms(q_norm_ptr, columns, HALF, R)
        inside = tile * TILE + tokens < tl.where((pages >= 0) & (pages < num_pages), known, 0)
        if WINDOW > 0:
            inside &= tile * TILE + tokens >= first_seen(known, WINDOW)
        k0, k1, v = load_tile(k_ptr, v_ptr, pages, head, tile, inside, KV_HEADS, D, PAGE, TILE)
        cos, sin, norm0, norm1 = hold(cos, PDL), hold(sin, PDL), hold(norm0, PDL), hold(norm1, PDL)
        k0, k1 = hold(k0, PDL), hold(k1, PDL)
        pages = pages_of(table_ptr, tile * TILE + TILE, M, PAGE, TILE)
        # Up to here nothing was read that the kernel ahead writes.
        wait_for_previous(PDL)
        q0, q1 = load_queries(
            first_ptr, norm0, norm1, norm2, cos, sin, eps, G, ROW, N * G, BLOCK_C, HALF, R, NORM,
            k_ptr.dtype.element_ty,
        )  # fmt: skip
        seen = (tile * TILE + tokens < known)[:, None]
        if WINDOW > 0:
            seen &= (tile * TILE + tokens)[:, None] >= first_seen(own, WINDOW)[None, :]
        acc, largest, weight = attend_to_tile(q0, q1, k0, k1, v, seen, acc, largest, weight, unit, WINDOW > 0)
    leave_part(part_ptr, stats_ptr, worker, acc, largest, weight, N * G, BLOCK_C, D)


@triton.jit(do_not_specialize=["num_workers"], do_not_specialize_on_alignment=["num_workers"])
def tried_rows_merge_kernel(
    sinks_ptr, rows_ptr, lengths_ptr, part_ptr, stats_ptr, out_ptr, num_workers,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_I: tl.constexpr, ROW_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B KV_HEADS, C, D / COLUMNS): one program merges the parts of one query, that of the newest tokens first,
    and counts its sink, if it has one.

    Those of rows that are no tokens give zeros.
    """
    let_next_start(PDL)
    G: tl.constexpr = H // KV_HEADS
    C: tl.constexpr = N * G
    pair = tl.program_id(0)
    query = tl.program_id(1)
    row = (pair // KV_HEADS).to(tl.int64) * N + query // G
    head = pair % KV_HEADS
    q_head = head * G + query % G
    record_ptr = rows_ptr + (pair // KV_HEADS) * ROW_WORDS
    tried = tl.load(lengths_ptr + row) > 0
    most = tl.load(record_ptr + 3)
    place = (tl.load(record_ptr + 2) + head * most) * C + query
    count = tl.where(tried, most, 0)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    parts = tl.arange(0, BLOCK_I)
    part_ptrs = part_ptr + place * D + (parts * (C * D))[:, None] + columns[None, :]
    stats_ptrs = stats_ptr + place * 2 + parts * (C * 2)
    newest = (num_workers + pair) * C + query
    if sinks_ptr is not None:
        sink = load_sinks(sinks_ptr, q_head, tried)
    wait_for_previous(PDL)
    acc = tl.load(part_ptr + newest * D + columns, mask=tried & (columns < D), other=0.0)
    largest = tl.load(stats_ptr + newest * 2, mask=tried, other=0.0)
    weight = tl.load(stats_ptr + newest * 2 + 1, mask=tried, other=1.0)
    acc, largest, weight = add_all_parts(acc, largest, weight, part_ptrs, stats_ptrs, count, C, D, BLOCK_I)
    if sinks_ptr is not None:
        # Not before: it may be so large that the weight of all else would be nothing beside it.
        weight += tl.exp2(sink - largest)
    y = (acc / weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * H + q_head) * D + columns, y)


def launch_tried_rows(
    qkv_TN: Tensor, cos_sin_PR: Tensor, shifts_S: Tensor | None, q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, few: FewRows,
    num_q_heads: int, scale: float, sinks_H: Tensor | None, out_THD: Tensor, norm_values: bool,
) -> None:  # fmt: skip
    """Two launches: the parts, and their merge. Graph-safe; `few` is planned, for several tokens of a slot."""
    num_pages, num_kv_heads, page_size, head_dim = k_cache.shape
    tries, norm = few.tries, q_norm_weight_D is not None
    B, queries = out_THD.shape[0] // tries, tries * num_q_heads // num_kv_heads
    overlap = overlap_options(qkv_TN)
    sizes = {"H": num_q_heads, "KV_HEADS": num_kv_heads, "D": head_dim, "N": tries}
    tried_rows_kernel[(B * num_kv_heads + few.num_workers,)](
        qkv_TN, q_norm_weight_D if norm else qkv_TN, k_norm_weight_D if norm else qkv_TN, cos_sin_PR, shifts_S,
        k_cache, v_cache, page_table_SM, few.rows_B4, few.workers_W8, few.lengths_T, few.part_IGD, few.stats_IG2, eps,
        scale, B, page_table_SM.shape[1], cos_sin_PR.shape[0], num_pages, few.num_workers,
        ROW=qkv_TN.stride(0), R=cos_sin_PR.shape[1], PAGE=page_size, TILE=few.tile, BLOCK_N=dot_block(tries),
        BLOCK_C=next_power_of_2(queries), WINDOW=few.window, ROW_WORDS=ROW_WORDS, WORKER_WORDS=WORKER_WORDS, NORM=norm,
        NORM_VALUES=norm_values, num_warps=_NUM_WARPS, **sizes, **overlap,
    )  # fmt: skip
    tried_rows_merge_kernel[(B * num_kv_heads, queries, head_dim // _MERGED_COLUMNS)](
        sinks_H, few.rows_B4, few.lengths_T, few.part_IGD, few.stats_IG2, out_THD, few.num_workers,
        COLUMNS=_MERGED_COLUMNS, BLOCK_I=_MERGED_PARTS, ROW_WORDS=ROW_WORDS, num_warps=_MERGE_WARPS, **sizes, **overlap,
    )  # fmt: skip
