"""Which tiles serve a product of rows that are rounded to eight bits, or that they are not.

Knows sizes alone, and always gives the same for the same. What it knows was measured on an H200 with the weights of
Qwen3-8B (docs/tried.md).
"""

import functools
from typing import NamedTuple

from torch import Tensor

from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import can_use_tma
from tercet.triton_kernels.round_rows import LONGEST
from tercet.triton_kernels.scaled_weight import TILE, ScaledWeight
from tercet.triton_kernels.tiles import cdiv

_FEWEST, _FEWEST_OF_ROWS = 33, 65
"""Rows from which to round them pays, with scales of blocks and of rows: fewer are multiplied as they are, in less time
or none more."""
_FEWEST_FOR_PARTS, _FEWEST_OF_ROWS_FOR_PARTS = 257, 193


class _Tile(NamedTuple):
    config: MatmulConfig
    us_by_k: float
    """For 128 of K."""
    us: float = 2.5
    """Ahead of its products and behind them."""


def _tile(rows: int, columns: int, stages: int, *, tall: bool = False) -> MatmulConfig:
    return MatmulConfig("fp8", rows, columns, TILE, num_warps=4, num_stages=stages, tall=tall)


def _rows(rows: int, columns: int, stages: int) -> MatmulConfig:
    return MatmulConfig("fp8_rows", rows, columns, TILE, num_warps=4, num_stages=stages)


_TILES = (
    # A scale for each group of columns.
    _Tile(_tile(64, 128, 8), 0.35),
    _Tile(_tile(64, 256, 4), 0.52),
    _Tile(_tile(128, 128, 6), 0.5),
    _Tile(_tile(128, 128, 4, tall=True), 0.7),
)
_TILES_OF_ROWS = (
    # One for a row.
    _Tile(_rows(128, 64, 8), 0.18, 4.2),
    _Tile(_rows(128, 128, 6), 0.3, 4.5),
    _Tile(_rows(128, 256, 4), 0.6, 5.5),
    _Tile(_rows(256, 128, 4), 0.6, 5.5),
)


def choose_fp8(x_MK: Tensor, w_NK: ScaledWeight, *, in_parts: bool = False) -> MatmulConfig | None:
    """None: rows are multiplied as they are. `in_parts`: as they are, K may be divided."""
    if w_NK.tile_scales is None or x_MK.dtype.itemsize != 2 or not is_hopper(x_MK.device):
        return None
    if not can_use_tma(x_MK, w_NK.numbers_NJ):
        return None
    of_rows = w_NK.tile_scales.ndim == 1
    fewest = _FEWEST_OF_ROWS if of_rows else _FEWEST
    if in_parts:
        fewest = _FEWEST_OF_ROWS_FOR_PARTS if of_rows else _FEWEST_FOR_PARTS
    if len(x_MK) < fewest:
        return None
    if of_rows and w_NK.shape[1] > LONGEST:
        return None
    return _first_through(len(x_MK), *w_NK.shape, multiprocessors(x_MK.device), of_rows)


@functools.cache
def _first_through(M: int, N: int, K: int, programs: int, of_rows: bool) -> MatmulConfig:
    """The tiles that are through first: multiprocessors take them in rounds, of which the last may be nearly empty."""

    def microseconds(tile: _Tile) -> float:
        tiles = cdiv(M, tile.config.height) * cdiv(N, tile.config.block_n)
        return cdiv(tiles, programs) * (tile.us_by_k * (K // TILE) + tile.us)

    return min(_TILES_OF_ROWS if of_rows else _TILES, key=microseconds).config
