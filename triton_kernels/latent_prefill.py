"""Prefill attention over a paged cache of latents: chunks of queries of all heads, causal.

A query of one head is a row like any other, since all heads see the same cells: a tile of tokens has as many rows as
they have heads together, and programs take some of them each.

Shape suffixes: T prefill tokens, H heads, D numbers of a query, L of a latent, S slots, M pages of a slot; the cache is
[page, 1, token of the page, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.latent_tile import attend_tile, cell_boxes, cells_of_tile, load_cells, load_queries
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prefill_work import RECORD, PrefillWork
from tercet.triton_kernels.tiles import cdiv, dot_block

_ROWS = 32
"""Of one program; in fp32 half as many, or they fill a small card's shared memory."""
_MOST_TOKENS = 16


def latent_query_tile(num_heads: int) -> int:
    """Tokens of a tile: as few as have no row to spare in the last program."""
    tokens = 1
    while tokens * num_heads % _ROWS and tokens < _MOST_TOKENS:
        tokens *= 2
    return tokens


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _latent_prefill_kernel(
    q_ptr, cache, latents, turned, page_table_ptr, tiles_ptr, out_ptr, scale, M,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of a tile x H / ROWS, tiles): one program owns ROWS rows of a tile; of padding it writes zeros."""
    let_next_start(PDL)
    cell_type: tl.constexpr = cache.dtype.element_ty
    record_ptr = tiles_ptr + tl.program_id(1) * RECORD
    num_queries = tl.load(record_ptr + 1)
    # Who has nothing to do makes room; but not all: the next kernel would find this one at its end too soon.
    if (tl.program_id(0) * ROWS >= num_queries * H) & (tl.program_id(0) + tl.program_id(1) > 0):
        return
    wait_for_previous(PDL)
    length = tl.load(record_ptr + 4)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < num_queries * H
    places = tl.load(record_ptr) * H + rows
    numbers = tl.arange(0, BLOCK_L)
    tokens = tl.arange(0, TILE)
    out_ptrs = out_ptr + places.to(tl.int64)[None, :] * L + numbers[:, None]
    mask = (numbers < L)[:, None] & real[None, :]
    if length == 0:
        tl.store(out_ptrs, tl.zeros((BLOCK_L, ROWS), out_ptr.dtype.element_ty), mask=mask)
    else:
        first_query = tl.load(record_ptr + 2)
        queries = first_query + rows // H
        # What the first of these rows sees, and what the last does.
        least = first_query + tl.program_id(0) * ROWS // H + 1
        most = first_query + tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // H + 1, num_queries)
        pages_ptr = page_table_ptr + tl.load(record_ptr + 3).to(tl.int64) * M
        q = load_queries(q_ptr, places, real, cell_type, L + R, 0, BLOCK_L, L)
        q_turned = load_queries(q_ptr, places, real, cell_type, L + R, L, BLOCK_R, L + R)
        unit = scale * 1.4426950408889634
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((BLOCK_L, ROWS), tl.float32)
        whole = least // TILE * TILE
        for start in tl.range(0, whole, TILE, num_stages=STAGES):
            latent, behind = load_cells(
                cache, latents, turned, pages_ptr, start, whole, PAGE, TILE, L, R, BLOCK_L, BLOCK_R, TMA, False
            )  # fmt: skip
            largest, weight, acc = attend_tile(
                q, q_turned, latent, behind, real[None, :], largest, weight, acc, unit, False, PRECISION
            )
        for start in tl.range(whole, most, TILE, num_stages=2):
            latent, behind = load_cells(
                cache, latents, turned, pages_ptr, start, most, PAGE, TILE, L, R, BLOCK_L, BLOCK_R, TMA, True
            )  # fmt: skip
            seen = (start + tokens)[:, None] <= queries[None, :]
            largest, weight, acc = attend_tile(
                q, q_turned, latent, behind, seen, largest, weight, acc, unit, True, PRECISION
            )
        tl.store(out_ptrs, (acc / weight[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


def launch_latent_prefill(
    q_THD: Tensor, cache: Tensor, page_table_SM: Tensor, scale: float, work: PrefillWork, out_THL: Tensor
) -> None:
    """Graph-safe: the grid covers any way of cutting T tokens into chunks; `work` is planned, and read before the wait
    (see overlap.py)."""
    _, H, D = q_THD.shape
    L, page_size = out_THL.shape[2], cache.shape[2]
    tile = cells_of_tile(cache)
    latents, turned, tma = cell_boxes(cache, L, tile)
    rows = _ROWS if q_THD.dtype.itemsize == 2 else _ROWS // 2
    _latent_prefill_kernel[(cdiv(work.block_q * H, rows), work.num_tiles)](
        q_THD, cache, latents, turned, page_table_SM, work.tiles_N8, out_THL, scale, page_table_SM.shape[1],
        H=H, L=L, R=D - L, PAGE=page_size, TILE=tile, ROWS=rows, BLOCK_L=dot_block(L), BLOCK_R=dot_block(D - L),
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32", STAGES=2, TMA=tma, RECORD=RECORD, num_warps=4,
        **overlap_options(q_THD),
    )  # fmt: skip
