"""Decode attention for few rows, from a layer's q, k, v rows to attended heads, by programs that do little each.

A few rows leave most of a GPU idle: what takes time is not bytes but one instruction behind another, and what cannot
begin before the kernel ahead has ended. So keys and values of old tokens are in registers by then, a program's row and
head are in its record, and the newest token, with the write to the cache, is the business of programs of its own.
Products are transposed: tokens, then the head's numbers, are their long side, and the q heads of one kv head the short.

Shape suffixes: T tokens of a tile, G q heads of one kv head, D head size, two halves of which turn together, I parts;
a row's heads are q heads, then k heads, then v heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.few_rows import ROW_WORDS, WORKER_WORDS, FewRows, load_record
from tercet.triton_kernels.few_tiles import (
    attend_to_tile,
    hold,
    leave_part,
    load_halves,
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
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.windows import first_seen

_NUM_WARPS = 4
_MERGED_PARTS, _MERGED_COLUMNS = 32, 32
"""What one program merges at once."""
_MERGE_WARPS = 1
_LOG2_E = tl.constexpr(1.4426950408889634)
_SIZES = ["B", "M", "P", "num_pages"]


@triton.jit
def _add_newest(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, k_ptr, v_ptr, page_table_ptr, rows_ptr, stats_ptr,
    eps, unit, M, P, num_pages,
    H: tl.constexpr, KV_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, NUM_WORKERS: tl.constexpr, ROW_WORDS: tl.constexpr, NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row's newest token and one kv head: its key and value into the cache, and its scores, each with what its value
    is multiplied by, if it is normed."""
    HALF: tl.constexpr = D // 2
    G: tl.constexpr = H // KV_HEADS
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    slot = tl.load(rows_ptr + row * ROW_WORDS).to(tl.int64)
    known = tl.load(rows_ptr + row * ROW_WORDS + 1)
    columns = tl.arange(0, HALF)
    numbers = tl.arange(0, D)
    at = tl.maximum(known, 0)
    page = tl.load(page_table_ptr + slot * M + tl.minimum(at // PAGE, M - 1)).to(tl.int64)
    turn = known
    if shifts_ptr is not None:
        turn += tl.load(shifts_ptr + slot)
    turn = tl.minimum(tl.maximum(turn, 0), P - 1)  # a row that is done has its slot's shift
    cos, sin = load_turns(cos_sin_ptr + turn.to(tl.int64) * R, columns, HALF, R)
    q_norm0, q_norm1, q_norm2 = load_norms(q_norm_ptr, columns, HALF, R)
    k_norm0, k_norm1, k_norm2 = load_norms(k_norm_ptr, columns, HALF, R)
    wait_for_previous(PDL)
    if known >= 0:
        heads_ptr = qkv_ptr + row * ROW
        k0, k1 = load_halves(heads_ptr + (H + head) * D, columns, HALF)
        partners = k0
        if R < D:
            partners = tl.load(heads_ptr + (H + head) * D + partner(columns, R), mask=columns < R, other=0.0)
            partners = partners.to(tl.float32)
        v = tl.load(heads_ptr + (H + KV_HEADS + head) * D + numbers)
        if NORM_VALUES:
            v = v.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
            v *= inverse
        v = v.to(v_ptr.dtype.element_ty)
        cell: tl.constexpr = k_ptr.dtype.element_ty
        q0, q1 = load_queries(
            heads_ptr + head * G * D, q_norm0, q_norm1, q_norm2, cos[None, :], sin[None, :], eps, G, ROW, G, BLOCK_G,
            HALF, R, NORM, cell,
        )  # fmt: skip
        squares = tl.sum(k0 * k0 + k1 * k1, 0)
        k0, k1 = turn_heads(k0, k1, partners, squares, k_norm0, k_norm1, k_norm2, cos, sin, eps, HALF, R, NORM)
        key0 = k0.to(cell)
        key1 = k1.to(cell)
        place = ((page * KV_HEADS + head) * PAGE + at % PAGE) * D
        # The first page belongs to nobody.
        inside = (page > 0) & (page < num_pages)
        tl.store(k_ptr + place + columns, key0, mask=inside)
        tl.store(k_ptr + place + HALF + columns, key1, mask=inside)
        tl.store(v_ptr + place + numbers, v, mask=inside)
        products = q0.to(tl.float32) * key0.to(tl.float32)[None, :] + q1.to(tl.float32) * key1.to(tl.float32)[None, :]
        group = tl.arange(0, BLOCK_G)
        places = (NUM_WORKERS + tl.program_id(0)) * G + group
        tl.store(stats_ptr + places * 2, tl.sum(products, 1) * unit, mask=group < G)
        if NORM_VALUES:
            tl.store(stats_ptr + places * 2 + 1, inverse, mask=group < G)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def few_rows_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, k_ptr, v_ptr, page_table_ptr, rows_ptr, workers_ptr,
    part_ptr, stats_ptr, eps, scale, B, M, P, num_pages,
    H: tl.constexpr, KV_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_G: tl.constexpr, NUM_WORKERS: tl.constexpr, WINDOW: tl.constexpr, ROW_WORDS: tl.constexpr,
    WORKER_WORDS: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B KV_HEADS + NUM_WORKERS,): newest tokens, then stretches of old ones; each leaves a part to be merged.

    Who has nothing to do makes room. The newest tokens' programs all wait: else the next kernel would find this one at
    its end too soon.
    """
    HALF: tl.constexpr = D // 2
    G: tl.constexpr = H // KV_HEADS
    unit = scale * _LOG2_E
    let_next_start(PDL)
    worker = tl.program_id(0) - B * KV_HEADS
    if worker < 0:
        _add_newest(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, shifts_ptr, k_ptr, v_ptr, page_table_ptr, rows_ptr, stats_ptr,
            eps, unit, M, P, num_pages, H, KV_HEADS, ROW, D, R, PAGE, BLOCK_G, NUM_WORKERS, ROW_WORDS, NORM,
            NORM_VALUES, PDL,
        )  # fmt: skip
        return
    record_ptr = workers_ptr + worker * WORKER_WORDS
    row, head, slot, known, begin, end = load_record(record_ptr)
    if begin == end:
        return
    table_ptr = page_table_ptr + slot * M
    pages = tl.load(record_ptr + 6) if PAGE % TILE == 0 else pages_of(table_ptr, begin * TILE, M, PAGE, TILE)
    tokens = tl.arange(0, TILE)
    columns = tl.arange(0, HALF)
    turn = known
    if shifts_ptr is not None:
        turn += tl.load(shifts_ptr + slot)
    cos_ptr = cos_sin_ptr + tl.minimum(turn, P - 1).to(tl.int64) * R
    first_ptr = qkv_ptr + row * ROW + head * G * D
    largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((D, BLOCK_G), tl.float32)
    for tile in tl.range(begin, end, num_stages=1):
        cos, sin = load_turns(cos_ptr, columns, HALF, R)
        norm0, norm1, norm2 = load_norms(q_norm_ptr, columns, HALF, R)
        inside = tile * TILE + tokens < tl.where((pages >= 0) & (pages < num_pages), known, 0)
        if WINDOW > 0:
            inside &= tile * TILE + tokens >= first_seen(known, WINDOW)
        k0, k1, v = load_tile(k_ptr, v_ptr, pages, head, tile, inside, KV_HEADS, D, PAGE, TILE)
        cos, sin, norm0, norm1 = hold(cos, PDL), hold(sin, PDL), hold(norm0, PDL), hold(norm1, PDL)
        k0, k1 = hold(k0, PDL), hold(k1, PDL)
        pages = pages_of(table_ptr, tile * TILE + TILE, M, PAGE, TILE)
        # Up to here nothing was read that the kernel ahead writes. From the second tile on this waits for nothing, and
        # the queries come from near by once more: code for the first tile alone would cost more.
        wait_for_previous(PDL)
        q0, q1 = load_queries(
            first_ptr, norm0, norm1, norm2, cos[None, :], sin[None, :], eps, G, ROW, G, BLOCK_G, HALF, R, NORM,
            k_ptr.dtype.element_ty,
        )  # fmt: skip
        seen = tile * TILE + tokens < known
        if WINDOW > 0:
            seen &= tile * TILE + tokens >= first_seen(known, WINDOW)
        acc, largest, weight = attend_to_tile(q0, q1, k0, k1, v, seen[:, None], acc, largest, weight, unit, False)
    leave_part(part_ptr, stats_ptr, worker, acc, largest, weight, G, BLOCK_G, D)


@triton.jit
def few_rows_merge_kernel(
    qkv_ptr, v_ptr, sinks_ptr, rows_ptr, part_ptr, stats_ptr, out_ptr,
    H: tl.constexpr, KV_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_I: tl.constexpr, NUM_WORKERS: tl.constexpr, ROW_WORDS: tl.constexpr, NORM_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B KV_HEADS, G, D / COLUMNS): one program merges, in order, the newest token and the parts of one q head,
    and counts its sink, if it has one.

    Rows of length 0 give zeros.
    """
    let_next_start(PDL)
    G: tl.constexpr = H // KV_HEADS
    pair = tl.program_id(0)
    row = (pair // KV_HEADS).to(tl.int64)
    head = pair % KV_HEADS
    record_ptr = rows_ptr + row * ROW_WORDS
    alive = tl.load(record_ptr + 1) >= 0
    count = tl.load(record_ptr + 3)
    place = (tl.load(record_ptr + 2) + head * count) * G + tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    parts = tl.arange(0, BLOCK_I)
    part_ptrs = part_ptr + place * D + (parts * (G * D))[:, None] + columns[None, :]
    stats_ptrs = stats_ptr + place * 2 + parts * (G * 2)
    if sinks_ptr is not None:
        sink = load_sinks(sinks_ptr, head * G + tl.program_id(1), alive)
    wait_for_previous(PDL)
    value_ptr = qkv_ptr + row * ROW + (H + KV_HEADS + head) * D
    value = tl.load(value_ptr + columns, mask=(columns < D) & alive, other=0.0)
    if NORM_VALUES:
        inverse_ptr = stats_ptr + ((NUM_WORKERS + pair) * G + tl.program_id(1)) * 2 + 1
        value = value.to(tl.float32) * tl.load(inverse_ptr, mask=alive, other=0.0)
    acc = value.to(v_ptr.dtype.element_ty).to(tl.float32)  # as the cache has it
    largest = tl.load(stats_ptr + ((NUM_WORKERS + pair) * G + tl.program_id(1)) * 2, mask=alive, other=0.0)
    weight = 1.0
    acc, largest, weight = add_all_parts(acc, largest, weight, part_ptrs, stats_ptrs, count, G, D, BLOCK_I)
    if sinks_ptr is not None:
        # Not before: it may be so large that the weight of all else would be nothing beside it.
        weight += tl.exp2(sink - largest)
    y = (acc / weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * H + head * G + tl.program_id(1)) * D + columns, y)


def launch_few_rows(
    qkv_BN: Tensor, cos_sin_PR: Tensor, shifts_S: Tensor | None, q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, few: FewRows,
    num_q_heads: int, scale: float, sinks_H: Tensor | None, out_BHD: Tensor, norm_values: bool,
) -> None:  # fmt: skip
    """Two launches: the parts, and their merge. Graph-safe; `few` is planned."""
    num_pages, num_kv_heads, page_size, head_dim = k_cache.shape
    B, group, norm = out_BHD.shape[0], num_q_heads // num_kv_heads, q_norm_weight_D is not None
    overlap = overlap_options(qkv_BN)
    few_rows_kernel[(B * num_kv_heads + few.num_workers,)](
        qkv_BN, q_norm_weight_D if norm else qkv_BN, k_norm_weight_D if norm else qkv_BN, cos_sin_PR, shifts_S,
        k_cache, v_cache, page_table_SM, few.rows_B4, few.workers_W8, few.part_IGD, few.stats_IG2, eps, scale, B,
        page_table_SM.shape[1], cos_sin_PR.shape[0], num_pages,
        H=num_q_heads, KV_HEADS=num_kv_heads, ROW=qkv_BN.stride(0), D=head_dim, R=cos_sin_PR.shape[1], PAGE=page_size,
        TILE=few.tile, BLOCK_G=next_power_of_2(group), NUM_WORKERS=few.num_workers, WINDOW=few.window,
        ROW_WORDS=ROW_WORDS, WORKER_WORDS=WORKER_WORDS, NORM=norm, NORM_VALUES=norm_values,
        num_warps=_NUM_WARPS, **overlap,
    )  # fmt: skip
    few_rows_merge_kernel[(B * num_kv_heads, group, head_dim // _MERGED_COLUMNS)](
        qkv_BN, v_cache, sinks_H, few.rows_B4, few.part_IGD, few.stats_IG2, out_BHD,
        H=num_q_heads, KV_HEADS=num_kv_heads, ROW=qkv_BN.stride(0), D=head_dim, COLUMNS=_MERGED_COLUMNS,
        BLOCK_I=_MERGED_PARTS, NUM_WORKERS=few.num_workers, ROW_WORDS=ROW_WORDS, NORM_VALUES=norm_values,
        num_warps=_MERGE_WARPS, **overlap,
    )  # fmt: skip
