"""Which kernel and which block sizes serve a product with scaled weights, or that they are better expanded first.

Knows sizes alone, and always gives the same for the same. What it knows of Hopper cards was measured with the weights
of Qwen3-8B, of "scaled" on an H100, of "groups" on an H200 (docs/tried.md).
"""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from tercet.triton_kernels.dispatch import INTERPRETED, is_hopper, multiprocessors
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import can_use_tma
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.tuning import row_bucket
from tercet.triton_kernels.untuned import PARTS, us_of_parts

_FEW = 16
"""Rows up to which a product waits for weights alone."""
_MOST, _MOST_ELSEWHERE = 2048, 256
"""Rows beyond which it costs no more to expand weights once than to widen them for each tile."""
_WIDEST_ELSEWHERE = 128
"""Columns of a tile, not on Hopper: with more, shared memory would be too small on some cards."""
_ASKED = 512
"""Columns that programs ask the L2 cache for ahead, of tiles up to so many rows."""
_FEW_IN_TILE = 64

_LONG = 8192
"""Columns beyond which a program for one row has other rows of weights: of FP8 twice as many, of four bits half."""


class _Tile(NamedTuple):
    """A kind of tile, and how long a Hopper multiprocessor is busy with some of them at once."""

    config: MatmulConfig
    least: int  # bucket of rows that it is for
    most: int
    at_once: int
    us_by_k: float  # for 1024 of K, however many there are
    us: float
    us_by_k_each: float  # for 1024 of K of one tile


def _tile(rows: int, block_k: int, stages: int) -> MatmulConfig:
    asked = _ASKED if rows <= _FEW_IN_TILE else 0
    return MatmulConfig("scaled", rows, 64, block_k, num_warps=4, num_stages=stages, prefetch=asked)


def _groups(rows: int, groups: int, block_k: int, stages: int, *, tall: bool = False) -> MatmulConfig:
    return MatmulConfig("groups", rows, 64 * groups, block_k, num_warps=4, num_stages=stages, tall=tall)


# Of "scaled" the fewest stages with which no more tiles fit a multiprocessor than go at once: where more fit, some
# multiprocessors are given several and others none. "groups" has one program each, which walks over tiles.
_TILES_OF_FP8 = (
    _Tile(_tile(16, 256, 3), 1, 16, 3, 3.3, 3.55, 1.3),
    _Tile(_tile(16, 256, 4), 1, 16, 2, 2.5, 2.5, 1.5),
    _Tile(_tile(16, 256, 6), 1, 16, 1, 2.85, 5.5, 0.0),
    _Tile(_tile(32, 128, 4), 32, 64, 3, 5.3, 2.15, 0.65),
    _Tile(_tile(32, 256, 3), 32, 64, 2, 3.7, 2.55, 0.35),
    _Tile(_tile(32, 256, 4), 32, 64, 1, 3.0, 3.0, 0.0),
    _Tile(_tile(64, 256, 3), 64, 192, 1, 3.5, 2.2, 0.0),
    _Tile(_tile(128, 128, 4), 128, 256, 1, 5.3, 2.9, 0.0),
    _Tile(_groups(64, 2, 128, 6), 64, 192, 1, 5.0, 4.2, 0.0),
    _Tile(_groups(64, 3, 128, 5), 64, 192, 1, 6.6, 4.8, 0.0),
    _Tile(_groups(128, 2, 128, 4), 128, 2048, 1, 6.4, 4.6, 0.0),
    _Tile(_groups(128, 3, 128, 4), 128, 2048, 1, 8.9, 5.5, 0.0),
    _Tile(_groups(128, 2, 128, 3, tall=True), 192, 2048, 1, 9.3, 5.2, 0.0),
    _Tile(_groups(128, 3, 64, 6, tall=True), 192, 2048, 1, 12.1, 9.0, 0.0),
    _Tile(_groups(256, 2, 64, 5), 256, 2048, 1, 11.0, 5.3, 0.0),
)
_TILES_OF_FOUR = (
    _Tile(_tile(16, 256, 4), 1, 16, 3, 3.1, 3.2, 0.5),
    _Tile(_tile(16, 256, 6), 1, 16, 2, 2.5, 2.7, 0.4),
    _Tile(_tile(16, 256, 8), 1, 16, 1, 2.45, 4.4, 0.0),
    _Tile(_tile(32, 256, 3), 32, 64, 3, 3.8, 2.25, 0.3),
    _Tile(_tile(32, 256, 4), 32, 64, 2, 2.9, 2.4, 0.25),
    _Tile(_tile(32, 256, 5), 32, 64, 1, 2.45, 3.0, 0.0),
    _Tile(_tile(64, 256, 3), 64, 192, 1, 3.05, 3.0, 0.0),
    _Tile(_tile(128, 128, 4), 128, 256, 1, 4.95, 3.05, 0.0),
    _Tile(_groups(64, 2, 128, 6), 64, 192, 1, 4.9, 3.0, 0.0),
    _Tile(_groups(64, 3, 128, 6), 64, 192, 1, 5.8, 4.0, 0.0),
    _Tile(_groups(128, 2, 128, 5), 128, 2048, 1, 6.4, 4.0, 0.0),
    _Tile(_groups(128, 3, 128, 5), 128, 2048, 1, 7.9, 4.5, 0.0),
    _Tile(_groups(128, 2, 128, 4, tall=True), 192, 2048, 1, 9.2, 4.4, 0.0),
    _Tile(_groups(128, 3, 128, 3, tall=True), 192, 2048, 1, 10.5, 9.0, 0.0),
    _Tile(_groups(256, 2, 128, 3), 256, 2048, 1, 10.3, 4.9, 0.0),
)
_FEW_OF_FP8 = MatmulConfig("skinny", 8, 32, 256, num_warps=2, num_stages=8, prefetch=_ASKED)
_FEW_OF_FOUR = replace(_FEW_OF_FP8, num_stages=14)
"""For so few rows, where nothing can add parts and tiles are too few for all multiprocessors: twice as many tiles, of
warps that wait for none of the others."""


def choose_scaled(
    x_MK: Tensor, w_NK: ScaledWeight, *, deterministic: bool = False, us_of_adding: float = math.inf
) -> MatmulConfig | None:  # fmt: skip
    """None: expand them. `us_of_adding`: that it takes to add a part of K, beyond reading it; inf: nothing can."""
    if x_MK.dtype.itemsize == 4:
        return None
    M, (N, K), widest, four = x_MK.shape[0], w_NK.shape, w_NK.widest, w_NK.four_bits
    if M == 1 and not deterministic and can_be_vector(w_NK):
        return _vector(K, four)
    if not is_hopper(x_MK.device):
        return None if M > _MOST_ELSEWHERE else _anywhere(row_bucket(M), N, min(widest, _WIDEST_ELSEWHERE))
    if _MOST < M or not can_use_tma(x_MK, w_NK.numbers_NJ):
        return None
    programs = multiprocessors(x_MK.device)
    return _on_hopper(M, N, K, four, widest, w_NK.widest_of_one_scale, programs, us_of_adding)


def can_be_vector(w_NK: ScaledWeight) -> bool:
    """Gluon cannot be interpreted."""
    return w_NK.dtype.itemsize == 2 and not INTERPRETED


def _vector(K: int, four: bool) -> MatmulConfig:
    width = 32 if four else 16  # columns of a thread
    warps = min(next_power_of_2(cdiv(K, 32 * width)), 4)
    rows = 8 if warps == 4 and (K > _LONG) != four else 4
    return MatmulConfig("vector", 1, rows, warps * 32 * width, num_warps=warps)


def _anywhere(bucket: int, N: int, block_k: int) -> MatmulConfig:
    rows = min(max(bucket, 8), 64)
    block_n = 16 if N <= 4096 and rows <= _FEW else 64
    return MatmulConfig("skinny", rows, block_n, block_k, num_warps=block_n // 16, num_stages=3)


@functools.cache
def _on_hopper(
    M: int, N: int, K: int, four: bool, widest: int, widest_of_groups: int, programs: int, us_of_adding: float
) -> MatmulConfig:  # fmt: skip
    bucket = row_bucket(M)
    few, known = (_FEW_OF_FOUR, _TILES_OF_FOUR) if four else (_FEW_OF_FP8, _TILES_OF_FP8)
    tiles = [tile for tile in known if tile.least <= bucket <= tile.most]
    # Tiles partly outside are slow by the copy engine: see `_full` in step_shape.py.
    full = [tile for tile in tiles if tile.config.kernel == "groups" or M % tile.config.block_m == 0]
    tiles = [tile._replace(config=_within(tile.config, widest, widest_of_groups)) for tile in full or tiles]
    ways = (
        (tile, parts)
        for tile in tiles
        for parts in PARTS
        if parts == 1 or (us_of_adding < math.inf and K % (parts * tile.config.block_k) == 0)
    )
    tile, parts = min(ways, key=lambda way: _microseconds(way[0], way[1], M, N, K, programs, us_of_adding))
    if bucket <= few.block_m and us_of_adding == math.inf and cdiv(N, tile.config.block_n) <= programs:
        return _within(few, widest, widest_of_groups)
    return replace(tile.config, parts=parts)


def _within(config: MatmulConfig, widest: int, widest_of_groups: int) -> MatmulConfig:
    """With blocks that K is made of."""
    return replace(config, block_k=min(widest_of_groups if config.kernel == "groups" else widest, config.block_k))


def _microseconds(
    tile: _Tile, parts: int, M: int, N: int, K: int, programs: int, us_of_adding: float
) -> float:  # fmt: skip
    tiles = cdiv(M, tile.config.height) * cdiv(N, tile.config.block_n) * parts
    each = cdiv(tiles, programs)
    rounds, by_k = cdiv(each, tile.at_once), K / parts / 1024
    us = rounds * (tile.us_by_k * by_k + tile.us) + each * tile.us_by_k_each * by_k
    return us if parts == 1 else us + us_of_parts(parts, M, N) + parts * us_of_adding
