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
from tercet.triton_kernels.scaled_weight import TILE, ScaledWeight
from tercet.triton_kernels.tiles import cdiv

_FEWEST, _FEWEST_FOR_PARTS = 129, 257
"""Rows from which to round them pays: fewer are multiplied as they are, in less time or none more."""
_US_OF_TILE = 2.5
"""Ahead of its products and behind them."""


class _Tile(NamedTuple):
    config: MatmulConfig
    us: float
    """For 128 of K."""


def _tile(rows: int, columns: int, stages: int, *, tall: bool = False) -> MatmulConfig:
    return MatmulConfig("fp8", rows, columns, TILE, num_warps=4, num_stages=stages, tall=tall)


_TILES = (
    _Tile(_tile(64, 128, 8), 0.35),
    _Tile(_tile(64, 256, 4), 0.52),
    _Tile(_tile(128, 128, 6), 0.5),
    _Tile(_tile(128, 128, 4, tall=True), 0.7),
)


def choose_fp8(x_MK: Tensor, w_NK: ScaledWeight, *, in_parts: bool = False) -> MatmulConfig | None:
    """None: rows are multiplied as they are. `in_parts`: as they are, K may be divided."""
    fewest = _FEWEST_FOR_PARTS if in_parts else _FEWEST
    if w_NK.tile_scales is None or len(x_MK) < fewest or x_MK.dtype.itemsize != 2 or not is_hopper(x_MK.device):
        return None
    if not can_use_tma(x_MK, w_NK.numbers_NJ):
        return None
    return _first_through(len(x_MK), *w_NK.shape, multiprocessors(x_MK.device))


@functools.cache
def _first_through(M: int, N: int, K: int, programs: int) -> MatmulConfig:
    """The tiles that are through first: multiprocessors take them in rounds, of which the last may be nearly empty."""

    def microseconds(tile: _Tile) -> float:
        tiles = cdiv(M, tile.config.height) * cdiv(N, tile.config.block_n)
        return cdiv(tiles, programs) * (tile.us * (K // TILE) + _US_OF_TILE)

    return min(_TILES, key=microseconds).config
