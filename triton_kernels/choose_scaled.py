"""Which kernel and which block sizes serve a product with weights in FP8, or that they are better expanded first.

Knows sizes alone, and always gives the same for the same. What it knows of Hopper cards was measured on an H100 with
the weights of four models (docs/tried.md).
"""

import functools
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import can_use_tma
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.tiles import cdiv
from tercet.triton_kernels.tuning import row_bucket
from tercet.triton_kernels.untuned import PARTS, us_of_parts

_FEW = 16
"""Rows up to which a product waits for weights alone."""
_MOST = 1024
"""Rows beyond which it costs less to expand weights once than to widen them for each tile, on Hopper."""
_MOST_ELSEWHERE = 256
_ASKED = 512
"""Columns that programs ask the L2 cache for ahead, of tiles up to so many rows."""
_FEW_IN_TILE = 64


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


_TILES = (
    _Tile(_tile(16, 128, 4), 1, 16, 1, 4.1, 2.4, 0.0),
    _Tile(_tile(16, 128, 6), 1, 16, 3, 3.0, 2.6, 1.75),
    _Tile(_tile(16, 128, 8), 1, 16, 2, 3.6, 2.3, 1.05),
    _Tile(_tile(32, 128, 4), 32, 64, 3, 4.2, 2.4, 1.1),
    _Tile(_tile(32, 128, 6), 32, 64, 2, 4.25, 2.5, 0.7),
    _Tile(_tile(32, 128, 8), 32, 64, 1, 4.5, 2.05, 0.0),
    _Tile(_tile(64, 128, 3), 64, 192, 3, 3.85, 3.1, 1.7),
    _Tile(_tile(64, 128, 4), 64, 192, 2, 3.9, 3.05, 1.25),
    _Tile(_tile(64, 128, 5), 64, 256, 1, 4.45, 2.75, 0.0),
    _Tile(_tile(128, 64, 3), 128, 1024, 3, 7.1, 2.95, 2.05),
    _Tile(_tile(128, 128, 3), 128, 1024, 2, 4.7, 3.4, 1.85),
    _Tile(_tile(128, 128, 4), 128, 1024, 1, 5.65, 2.7, 0.0),
    _Tile(_tile(256, 64, 3), 256, 1024, 2, 8.15, 4.85, 3.0),
    _Tile(_tile(256, 128, 3), 256, 1024, 1, 7.85, 4.1, 0.0),
)


def choose_scaled(
    x_MK: Tensor, w_NK: ScaledWeight, *, deterministic: bool, in_parts: bool = False
) -> MatmulConfig | None:
    """None: expand them. `in_parts`: what comes next can add parts of K."""
    block_k = _block_k(w_NK)
    if x_MK.dtype.itemsize == 4 or block_k == 0:
        return None
    M, (N, K) = x_MK.shape[0], w_NK.shape
    if not is_hopper(x_MK.device):
        return None if deterministic or M > _MOST_ELSEWHERE else _anywhere(row_bucket(M), N, block_k)
    if M > _MOST or not can_use_tma(x_MK, w_NK.numbers_NK):
        return None
    return _on_hopper(M, N, K, block_k, multiprocessors(x_MK.device), deterministic, in_parts)


def _block_k(w_NK: ScaledWeight) -> int:
    """Most columns of a block that share a scale; 0: those of none do."""
    if len(w_NK.scales_GN) == 1:
        return 128
    return next((block for block in (128, 64, 32) if w_NK.group % block == 0), 0)


def _anywhere(bucket: int, N: int, block_k: int) -> MatmulConfig:
    rows = min(max(bucket, 8), 64)
    block_n = 16 if N <= 4096 and rows <= _FEW else 64
    return MatmulConfig("skinny", rows, block_n, block_k, num_warps=block_n // 16, num_stages=3)


@functools.cache
def _on_hopper(
    M: int, N: int, K: int, block_k: int, programs: int, deterministic: bool, in_parts: bool
) -> MatmulConfig:  # fmt: skip
    bucket = row_bucket(M)
    tiles = [tile for tile in _TILES if tile.least <= bucket <= tile.most]
    # Tiles partly outside are slow by the copy engine: see `_full` in step_shape.py.
    tiles = [tile for tile in tiles if M % tile.config.block_m == 0] or tiles
    ways = (
        (tile, parts)
        for tile in tiles
        for parts in (PARTS if in_parts else (1,))
        if parts == 1 or K % (parts * tile.config.block_k) == 0
    )
    tile, parts = min(ways, key=lambda way: _microseconds(way[0], way[1], M, N, K, programs))
    if bucket <= _FEW and parts == 1 and not deterministic and cdiv(N, tile.config.block_n) <= programs:
        return _few_rows(bucket, block_k)
    return replace(tile.config, block_k=min(block_k, tile.config.block_k), parts=parts)


def _microseconds(tile: _Tile, parts: int, M: int, N: int, K: int, programs: int) -> float:
    tiles = cdiv(M, tile.config.block_m) * cdiv(N, tile.config.block_n) * parts
    each = cdiv(tiles, programs)
    rounds, by_k = cdiv(each, tile.at_once), K / parts / 1024
    us = rounds * (tile.us_by_k * by_k + tile.us) + each * tile.us_by_k_each * by_k
    return us + us_of_parts(parts, M, N)


def _few_rows(bucket: int, block_k: int) -> MatmulConfig:
    """Tiles too few for all multiprocessors: warps of smaller instructions are through with one sooner."""
    if bucket == _FEW:
        return MatmulConfig("skinny", 16, 32, block_k, num_warps=2, num_stages=8)
    return MatmulConfig("skinny", 8, 64, block_k, num_warps=4, num_stages=4)
