"""What attention makes of one tile of latents: products and sums in which heads are columns.

A tile is the first factor of both products, as it lies in memory and turned over, so that it is read once; and that is
where products want many rows, of which a step of few heads has no other.

Shape suffixes: C cells of a tile, G queries (heads of tokens), L numbers of a latent, R those behind it that turn.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.triton_kernels.cells import as_factor
from tercet.triton_kernels.dispatch import has_little_shared_memory, is_hopper
from tercet.triton_kernels.tiles import dot_block


@triton.jit
def load_queries(
    q_ptr, places, mask, cell: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    END: tl.constexpr,
):  # fmt: skip
    """[G, BLOCK] numbers of queries from FIRST on, as factors of cells."""
    columns = FIRST + tl.arange(0, BLOCK)
    inside = mask[:, None] & (columns < END)[None, :]
    q = tl.load(q_ptr + places.to(tl.int64)[:, None] * D + columns[None, :], mask=inside, other=0.0)
    return as_factor(q, q.dtype, cell)


@triton.jit
def load_cells(
    cache, latents, turned, pages_ptr, start, end,
    PAGE: tl.constexpr, TILE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, TMA: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The cells of a sequence from token `start` on: [C, BLOCK_L] latents, and [C, BLOCK_R] what is behind them.

    CUT: zeros in place of those from token `end` on, which may hold anything, NaN too.
    """
    cell = tl.load(pages_ptr + start // PAGE).to(tl.int64) * PAGE + start % PAGE
    if TMA and not CUT:
        latent = latents.load([cell.to(tl.int32), 0])
        behind = turned.load([cell.to(tl.int32), L])
    else:
        tokens = tl.arange(0, TILE)[:, None]
        columns = tl.arange(0, BLOCK_L)[None, :]
        more = tl.arange(0, BLOCK_R)[None, :]
        pointers = cache + (cell + tokens).to(tl.int64) * (L + R)
        inside = tokens < end - start if CUT else tokens < TILE
        latent = tl.load(pointers + columns, mask=inside & (columns < L), other=0.0)
        behind = tl.load(pointers + L + more, mask=inside & (more < R), other=0.0)
    return latent, behind


@triton.jit
def attend_tile(
    q, q_behind, latent, behind, seen, largest, weight, acc, unit, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """The sums over one more tile. Scores are in units of log 2. MASKED: `seen` [C, G] says who sees what; else all."""
    latent = latent.to(q.dtype)
    behind = behind.to(q.dtype)
    scores = tl.dot(latent, tl.trans(q), input_precision=PRECISION)
    scores = tl.dot(behind, tl.trans(q_behind), scores, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 0) * unit)
    finite = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    # Fused by hand: a row's bits are not to follow from where in a tile it stands.
    weights = tl.exp2(tl.fma(scores, unit, finite[None, :] * -1))
    rescale = tl.exp2(largest - finite)
    weight = tl.fma(weight, rescale, tl.sum(weights, 0))
    acc = acc * rescale[None, :]
    acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc, input_precision=PRECISION)
    return new, weight, acc


def cells_of_tile(cache: Tensor) -> int:
    """Cells that kernels take at a time."""
    if cache.dtype.itemsize == 4:
        return 16  # whose products are written out number by number: of more they take a minute to compile
    return min(cache.shape[2], 32 if has_little_shared_memory(cache.device) else 64)


def cell_boxes(
    cache: Tensor, rank: int, tile: int
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor, bool]:
    """Boxes for Hopper's copy engine, of latents and of what is behind them, and whether they are such."""
    D = cache.shape[3]
    sizes = rank, D - rank
    if not is_hopper(cache.device) or cache.dtype.itemsize > 2 or any(dot_block(size) != size for size in sizes):
        return cache, cache, False
    flat = cache.view(-1, D)
    latents, behind = (TensorDescriptor.from_tensor(flat, [tile, size]) for size in sizes)
    return latents, behind, True
