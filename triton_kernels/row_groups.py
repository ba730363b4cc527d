"""A step's rows by their adapters, in tiles that are of one adapter each: made once, for all products of the step.

Rows are grouped in blocks of up to 512, each for itself: prompts have few adapters in a block, and decode rows are one.
Within an adapter's tiles rows keep their order. Knows no matrix.

Shape suffixes: T rows, B blocks, M tiles of a block, H rows of a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_indices
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import cdiv

_FEW_ROWS, _BLOCK = 64, 512
_FEW_ROWS_HEIGHT, _MANY_ROWS_HEIGHT = 16, 64
_COLUMNS = 32
NO_TILE: tl.constexpr = tl.constexpr(-2)
_SIZES = ["T", "tiles"]


@dataclass(frozen=True)
class RowGroups:
    """Where there are kernels, each block's tiles are behind each other, and behind them NO_TILE."""

    adapters_T: Tensor
    """Of each row; -1: none. These rows have tiles, too."""
    rows_BMH: Tensor
    """A tile's rows, -1 in places that are left."""
    adapters_BM: Tensor
    """Each tile's."""
    deterministic: bool
    """A row's bits are not to depend on T."""

    def __len__(self) -> int:
        return len(self.adapters_T)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _group_rows_kernel(
    adapters_ptr, orders_ptr, rows_ptr, tile_adapters_ptr, T, tiles,
    BLOCK: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, NO_TILE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks,): a row's place among those of its adapter is how many come before; the adapter's first tile comes
    behind all tiles of smaller ones, each of which is begun by one of their rows.

    `orders`: scratch, of each row that place.
    """
    block = tl.program_id(0)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    adapters = tl.load(adapters_ptr + rows, mask=rows < T, other=2147483647)
    order = tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, COLUMNS):
        others = block * BLOCK + start + tl.arange(0, COLUMNS)
        theirs = tl.load(adapters_ptr + others, mask=others < T, other=-3)
        before = (theirs[None, :] == adapters[:, None]) & (others[None, :] < rows[:, None])
        order += tl.sum(before.to(tl.int32), 1)
    tl.store(orders_ptr + rows, order, mask=rows < T)
    for start in range(0, tiles, COLUMNS):
        tile = start + tl.arange(0, COLUMNS)
        tl.store(tile_adapters_ptr + block * tiles + tile, NO_TILE, mask=tile < tiles)
    for start in range(0, tiles * HEIGHT, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(rows_ptr + block * tiles * HEIGHT + place, -1, mask=place < tiles * HEIGHT)
    tl.debug_barrier()
    tile = order // HEIGHT
    for start in range(0, BLOCK, COLUMNS):
        others = block * BLOCK + start + tl.arange(0, COLUMNS)
        theirs = tl.load(adapters_ptr + others, mask=others < T, other=2147483647)
        begins = tl.load(orders_ptr + others, mask=others < T, other=1) % HEIGHT == 0
        ahead = (theirs[None, :] < adapters[:, None]) & begins[None, :]
        tile += tl.sum(ahead.to(tl.int32), 1)
    tile += block * tiles
    tl.store(rows_ptr + tile * HEIGHT + order % HEIGHT, rows, mask=rows < T)
    tl.store(tile_adapters_ptr + tile, adapters, mask=(rows < T) & (order % HEIGHT == 0))


def group_rows(adapters_T: Tensor, num_adapters: int, *, deterministic: bool) -> RowGroups:
    """Rows of adapters 0 to `num_adapters` - 1, or of none: -1. `deterministic`: a row's bits are not to depend on T.

    Mutates nothing; graph-safe.
    """
    check_indices("adapters", adapters_T, adapters_T, None)
    if num_adapters < 1:
        raise ValueError(f"num_adapters: got {num_adapters}, wanted at least 1")
    T = len(adapters_T)
    height = _FEW_ROWS_HEIGHT if deterministic or T <= _BLOCK else _MANY_ROWS_HEIGHT
    block = _FEW_ROWS if T <= _FEW_ROWS else _BLOCK
    # A group has at most one tile that is not full, and a row opens at most one.
    tiles = min(block // height + num_adapters + 1, T, block)
    rows_BMH = adapters_T.new_empty(cdiv(T, block), tiles, height)
    tile_adapters_BM = adapters_T.new_empty(cdiv(T, block), tiles)
    groups = RowGroups(adapters_T, rows_BMH, tile_adapters_BM, deterministic)
    if not use_kernels(adapters_T):
        return group_rows_reference(groups, block)
    if T:
        _group_rows_kernel[(cdiv(T, block),)](
            adapters_T, torch.empty_like(adapters_T), rows_BMH, tile_adapters_BM, T, tiles,
            BLOCK=block, HEIGHT=height, COLUMNS=_COLUMNS, NO_TILE=NO_TILE, num_warps=4 if block == _FEW_ROWS else 16,
        )  # fmt: skip
    return groups


def group_rows_reference(groups: RowGroups, block: int) -> RowGroups:
    """The same in PyTorch, into what is there."""
    groups.rows_BMH.fill_(-1)
    groups.adapters_BM.fill_(NO_TILE.value)
    height = groups.rows_BMH.shape[2]
    for index, adapters in enumerate(groups.adapters_T.split(block)):
        tile = 0
        for adapter in adapters.unique().tolist():
            for rows in (adapters == adapter).nonzero()[:, 0].split(height):
                groups.rows_BMH[index, tile, : len(rows)] = index * block + rows.int()
                groups.adapters_BM[index, tile] = adapter
                tile += 1
    return groups
