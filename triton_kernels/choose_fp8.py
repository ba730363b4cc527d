"""Which tiles serve a product of rows that are rounded to eight bits, or that they are not.

Knows sizes alone, and always gives the same for the same. What it knows was measured on an H200 with the weights of
Qwen3-8B (docs/tried.md).
"""

import functools
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import can_use_tma
from tercet.triton_kernels.scaled_weight import TILE, ScaledWeight
from tercet.triton_kernels.tiles import cdiv
from tercet.triton_kernels.untuned import PARTS, us_of_parts

_FEWEST = 129
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


def choose_fp8(x_MK: Tensor, w_NK: ScaledWeight, *, added: bool = False) -> MatmulConfig | None:
    """None: rows are multiplied as they are. `added`: what comes next adds parts of K up."""
    if w_NK.tile_scales is None or len(x_MK) < _FEWEST or x_MK.dtype.itemsize != 2 or not is_hopper(x_MK.device):
        return None
    if not can_use_tma(x_MK, w_NK.numbers_NJ):
        return None
    return _first_through(len(x_MK), *w_NK.shape, multiprocessors(x_MK.device), added)


@functools.cache
def _first_through(M: int, N: int, K: int, programs: int, added: bool) -> MatmulConfig:
    """The tiles that are through first: multiprocessors take them in rounds, of which the last may be nearly empty."""

    def microseconds(way: tuple[_Tile, int]) -> float:
        tile, parts = way
        tiles = cdiv(M, tile.config.height) * cdiv(N, tile.config.block_n) * parts
        return cdiv(tiles, programs) * (tile.us * (K // TILE / parts) + _US_OF_TILE) + us_of_parts(parts, M, N)

    divided = [parts for parts in PARTS if parts == 1 or (added and K % (TILE * parts) == 0)]
    tile, parts = min(((tile, parts) for tile in _TILES for parts in divided), key=microseconds)
    return replace(tile.config, parts=parts)
