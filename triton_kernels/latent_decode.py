"""Decode attention over a paged cache of latents: one query a sequence, or its last few, of all heads.

As in `decode_attention.py` programs work off the splits that a step's rows are cut into (`decode_work.py`), and a last
kernel merges the splits of a sequence in their order. All heads see the same cells: a program takes as many as it can.

Shape suffixes: T queries of decode rows, H heads, or those of all queries of a row, G of one program, D numbers of a
query, L of a latent, S slots, M pages of a slot, I splits; the cache is [page, 1, token of the page, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.decode_work import DecodeWork
from tercet.triton_kernels.dispatch import multiprocessors
from tercet.triton_kernels.latent_decode_hopper import can_use_hopper, launch_splits
from tercet.triton_kernels.latent_tile import attend_tile, cell_boxes, cells_of_tile, load_cells, load_queries
from tercet.triton_kernels.merge_splits import merge_splits
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, dot_block

_MOST = 32
"""Heads of one program, those of several queries of a row among them."""


def latent_blocks(num_heads: int, tries: int = 1) -> int:
    """How many programs share the heads of a row: a split is theirs one by one, as it is kv heads' elsewhere."""
    return cdiv(num_heads * tries, _MOST)


@triton.jit(do_not_specialize=["M", "num_programs"], do_not_specialize_on_alignment=["M", "num_programs"])
def _latent_decode_kernel(
    q_ptr, cache, latents, turned, page_table_ptr, items_ptr, num_items_ptr, lengths_ptr, partial_ptr, stats_ptr,
    out_ptr, scale, M, num_programs,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, TRIES: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    PERSISTENT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (num_programs,): each program takes one pair of a split and a block of heads, or every num_programs-th one.

    A row's heads are those of each of TRIES queries behind each other.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    cell_type: tl.constexpr = cache.dtype.element_ty
    unit = scale * 1.4426950408889634
    numbers = tl.arange(0, BLOCK_L)
    tokens = tl.arange(0, TILE)
    first_pair = tl.program_id(0)
    end_pair = first_pair + 1
    if PERSISTENT:
        end_pair = tl.load(num_items_ptr) * BLOCKS
    for pair in range(first_pair, end_pair, num_programs):
        item = pair // BLOCKS
        row = tl.load(items_ptr + item * 8)
        begin = tl.load(items_ptr + item * 8 + 1)
        end = tl.load(items_ptr + item * 8 + 2)
        slot = tl.load(items_ptr + item * 8 + 3)
        count = tl.load(items_ptr + item * 8 + 5)
        if row < 0:
            begin = 0
            end = 0
            slot = 0
        pages_ptr = page_table_ptr + slot.to(tl.int64) * M
        heads = pair % BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)
        real = (heads < TRIES * H) & (row >= 0)
        places = row * (TRIES * H) + heads
        limits = heads * 0 + end
        if TRIES > 1:
            limits = tl.load(lengths_ptr + row * TRIES + heads // H, mask=real, other=0)
        q = load_queries(q_ptr, places, real, cell_type, L + R, 0, BLOCK_L, L)
        q_turned = load_queries(q_ptr, places, real, cell_type, L + R, L, BLOCK_R, L + R)
        largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_L, BLOCK_G), tl.float32)
        whole = begin + (end - begin) // TILE * TILE
        for start in tl.range(begin, whole, TILE, num_stages=STAGES):
            latent, behind = load_cells(
                cache, latents, turned, pages_ptr, start, whole, PAGE, TILE, L, R, BLOCK_L, BLOCK_R, TMA, False
            )  # fmt: skip
            seen = (start + tokens)[:, None] < limits[None, :]
            largest, weight, acc = attend_tile(
                q, q_turned, latent, behind, seen, largest, weight, acc, unit, TRIES > 1, PRECISION
            )
        # The last cells, if they are no whole tile. A loop, so that they, too, come without a stop in registers.
        for start in tl.range(whole, end, TILE, num_stages=2):
            latent, behind = load_cells(
                cache, latents, turned, pages_ptr, start, end, PAGE, TILE, L, R, BLOCK_L, BLOCK_R, TMA, True
            )  # fmt: skip
            seen = (start + tokens)[:, None] < tl.minimum(limits, end)[None, :]
            largest, weight, acc = attend_tile(
                q, q_turned, latent, behind, seen, largest, weight, acc, unit, True, PRECISION
            )
        mask = (numbers < L)[:, None] & real[None, :]
        if count == 1:
            if TRIES > 1:  # those that are none have seen nothing
                weight = tl.where(weight > 0, weight, 1.0)
            out_ptrs = out_ptr + places.to(tl.int64)[None, :] * L + numbers[:, None]
            tl.store(out_ptrs, (acc / weight[None, :]).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part = item.to(tl.int64) * (TRIES * H) + heads
            tl.store(partial_ptr + part[None, :] * L + numbers[:, None], acc, mask=mask)
            tl.store(stats_ptr + part * 2, largest, mask=real)
            tl.store(stats_ptr + part * 2 + 1, weight, mask=real)


def launch_latent_decode(
    q_THD: Tensor, cache: Tensor, page_table_SM: Tensor, scale: float, work: DecodeWork, out_THL: Tensor
) -> None:
    """Two launches: the splits, and their merge. Graph-safe; `work` is planned for `latent_blocks` heads."""
    T, H, L = out_THL.shape
    heads, blocks = work.tries * H, latent_blocks(H, work.tries)
    block_g = dot_block(cdiv(heads, blocks))
    if can_use_hopper(cache, L):
        launch_splits(q_THD, cache, page_table_SM, scale, work, out_THL, blocks, block_g)
    else:
        _launch_splits(q_THD, cache, page_table_SM, scale, work, out_THL, blocks, block_g)
    rows = out_THL.view(T // work.tries, heads, L)
    merge_splits(work.counts_B, work.starts_B, work.partial_IHD, work.stats_IH2, rows)


def _launch_splits(
    q_THD: Tensor, cache: Tensor, page_table_SM: Tensor, scale: float, work: DecodeWork, out_THL: Tensor, blocks: int,
    block_g: int,
) -> None:  # fmt: skip
    _, H, D = q_THD.shape
    L, page_size = out_THL.shape[2], cache.shape[2]
    num_programs = multiprocessors(q_THD.device)
    if not work.fixed:
        num_programs = work.items_I8.shape[0] * blocks
    tile = cells_of_tile(cache)
    latents, turned, tma = cell_boxes(cache, L, tile)
    _latent_decode_kernel[(num_programs,)](
        q_THD, cache, latents, turned, page_table_SM, work.items_I8, work.num_items_1,
        work.items_I8 if work.lengths_T is None else work.lengths_T, work.partial_IHD, work.stats_IH2, out_THL, scale,
        page_table_SM.shape[1], num_programs,
        H=H, L=L, R=D - L, PAGE=page_size, TILE=tile, TRIES=work.tries, BLOCKS=blocks, BLOCK_G=block_g,
        BLOCK_L=dot_block(L), BLOCK_R=dot_block(D - L), PERSISTENT=work.fixed,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32", STAGES=2, TMA=tma, num_warps=4,
        **overlap_options(q_THD),
    )  # fmt: skip
