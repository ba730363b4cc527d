"""Which kernel and which block sizes serve a product that no table has.

Knows sizes alone, and always gives the same for the same: nothing is measured here. What it knows of Hopper cards was
measured on an H200 with the weights of eight models (docs/tried.md).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from tercet.triton_kernels.matmul_config import EARLY_BYTES, MatmulConfig
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_HEAD = 50_000
"""Columns beyond which a product is a vocabulary's: so many tiles that any size of theirs fills a card."""
_FEW = 16
"""Rows up to which a product waits for weights alone."""
_MULTIPROCESSORS = 132
"""Of most Hopper cards; some have a few less."""
_APART = MatmulConfig("apart", 0, 0, 0, 0)


class _Tile(NamedTuple):
    """A kind of tile, and how long a Hopper multiprocessor is busy with one."""

    config: MatmulConfig
    least: int  # bucket of rows that it is for
    most: int
    us_by_k: float  # for 1024 of K
    us: float  # for all else


_TILES = (
    _Tile(MatmulConfig("skinny", 32, 64, 128, num_warps=4, num_stages=5), 32, 64, 2.1, 2.6),
    _Tile(MatmulConfig("skinny", 32, 128, 128, num_warps=8, num_stages=5), 32, 32, 3.4, 5.5),
    _Tile(MatmulConfig("wave", 64, 64, 128, num_warps=4, num_stages=5), 64, 128, 2.4, 2.5),
    _Tile(MatmulConfig("wave", 64, 64, 128, num_warps=4, num_stages=4, extra=True), 64, 192, 3.2, 3.3),
    _Tile(MatmulConfig("wave", 64, 128, 128, num_warps=4, num_stages=3, extra=True), 64, 64, 5.6, 6.5),
    _Tile(MatmulConfig("wave", 64, 128, 128, num_warps=4, num_stages=4), 192, 192, 3.15, 3.0),
    _Tile(MatmulConfig("wave", 64, 128, 64, num_warps=4, num_stages=6, extra=True), 192, 192, 4.3, 4.3),
    _Tile(MatmulConfig("hopper", 128, 64, 64, num_warps=4, num_stages=8), 128, 512, 2.85, 4.2),
    _Tile(MatmulConfig("wave", 128, 64, 128, num_warps=4, num_stages=4), 128, 128, 3.4, 3.3),
    _Tile(MatmulConfig("wave", 128, 64, 64, num_warps=4, num_stages=6), 256, 512, 3.3, 3.2),
    _Tile(MatmulConfig("wave", 128, 64, 64, num_warps=4, num_stages=6, tall=True), 192, 192, 4.6, 2.5),
    _Tile(MatmulConfig("wave", 128, 64, 128, num_warps=4, num_stages=4, extra=True), 128, 512, 4.8, 3.8),
    _Tile(MatmulConfig("hopper", 128, 128, 64, num_warps=4, num_stages=6), 128, 8192, 4.75, 4.5),
    _Tile(MatmulConfig("wave", 128, 128, 64, num_warps=8, num_stages=6), 128, 512, 4.75, 4.9),
    _Tile(MatmulConfig("wave", 128, 128, 64, num_warps=8, num_stages=4, extra=True), 128, 128, 8.0, 5.5),
    _Tile(MatmulConfig("wave", 128, 128, 64, num_warps=8, num_stages=5, tall=True), 192, 192, 8.0, 4.5),
    _Tile(MatmulConfig("wave", 128, 128, 64, num_warps=8, num_stages=5, extra=True), 256, 1024, 7.9, 5.2),
    _Tile(MatmulConfig("hopper", 128, 256, 64, num_warps=4, num_stages=4), 128, 2048, 9.5, 5.5),
    _Tile(MatmulConfig("wave", 128, 256, 64, num_warps=8, num_stages=4, tall=True), 192, 192, 15.5, 8.0),
    _Tile(MatmulConfig("wave", 128, 256, 64, num_warps=8, num_stages=3, extra=True), 256, 512, 14.3, 10.0),
    _Tile(MatmulConfig("hopper", 256, 128, 64, num_warps=4, num_stages=4, group_m=4), 8192, 8192, 9.4, 5.5),
)
PARTS = (1, 2, 4)
_US_OF_PART = 0.5
_BYTES_IN_US = 5e6
"""Of parts that a kernel writes and the norm behind it reads."""


def heuristic(
    op: str, bucket: int, N: int, K: int, dtype: torch.dtype, deterministic: bool, hopper: bool = False,
    tight: bool = False,
) -> MatmulConfig:  # fmt: skip
    """Block sizes that are never far off: few rows stream weights, many rows fill tiles.

    `hopper`: what may use TMA; `tight`: with little shared memory.
    """
    wide = dtype.itemsize == 4
    if hopper and not wide:
        return _on_hopper(op, bucket, N, K, deterministic)
    if bucket == 1 and not deterministic:
        return MatmulConfig("vector", 1, 4 if K <= 4096 else 2, min(next_power_of_2(K), 4096), num_warps=4)
    if bucket <= 16 and not deterministic:
        block_k, stages = 64 if wide else 128, 3 if wide and tight else 4
        return MatmulConfig("split", max(bucket, 8), 16, block_k, num_warps=4, num_stages=stages, splits=4)
    if bucket <= 64:
        rows = max(bucket, 8)
        block_n = 16 if N <= 4096 else 32
        return MatmulConfig("skinny", rows, block_n, 64 if wide else 128, num_warps=block_n // 16, num_stages=4)
    if wide:
        return MatmulConfig("tile", 64, 64, 32, num_warps=4, num_stages=3)
    if bucket <= 256:
        return MatmulConfig("tile", 64, 64, 64, num_warps=4, num_stages=4)
    return MatmulConfig("tile", 128, 128, 64, num_warps=8, num_stages=3)


def _on_hopper(op: str, bucket: int, N: int, K: int, deterministic: bool) -> MatmulConfig:
    # Parts are added up by the norm behind, in an order of their own.
    parts_allowed = op == "matmul_add" and not deterministic
    if op.startswith("rms_norm_"):
        return _norming(bucket, N, K) if bucket <= _FEW and not deterministic else _APART
    if bucket > _FEW:
        return _first_through(bucket, N, K, parts_allowed)
    if N > _HEAD and (bucket > 1 or deterministic):
        rows = max(bucket, 8)
        return MatmulConfig("skinny", rows, 128, 128, num_warps=4 if rows == 8 else 1, num_stages=3)
    if deterministic:
        return _few_in_plain_order(bucket, K, 1)
    return _one_row(N, K) if bucket == 1 else _few_rows(bucket, N, K, parts_allowed)


def _norming(bucket: int, N: int, K: int) -> MatmulConfig:
    """Every program norms the rows once more: that pays for small weights, and for few rows or short ones."""
    pays = N * K <= 2**23 or (bucket <= 8 and (K <= 2048 or N * K <= 2**24))
    return _early(bucket) if pays and N <= _HEAD and _is_early(N, K) else _APART


def _one_row(N: int, K: int) -> MatmulConfig:
    if N * K <= 2**23 and _is_early(N, K):
        return _early(1)
    if N > _HEAD and K >= 2048:
        return MatmulConfig("vector", 1, 2, 1024, num_warps=2)
    block_k = 2048 if K >= 4096 and N < 4096 else 1024
    return MatmulConfig("vector", 1, 4, min(next_power_of_2(K), block_k), num_warps=4)


def _few_rows(bucket: int, N: int, K: int, parts_allowed: bool) -> MatmulConfig:
    if bucket == 16 and N * K <= 2**22:
        return MatmulConfig("split", 16, 16, 128, num_warps=4, num_stages=5, splits=4)
    if bucket < 16 and (K <= 2048 or N * K <= 2**24) and _is_early(N, K):
        return _early(bucket)
    # So narrow that one program for each tile would be too few.
    divided = parts_allowed and N <= 5120 and K % 256 == 0 and (bucket == 16 or K >= 5120)
    return _few_in_plain_order(bucket, K, 2 if divided else 1)


def _few_in_plain_order(bucket: int, K: int, parts: int) -> MatmulConfig:
    """Narrow tiles, many of them on the way."""
    if bucket == 1:
        return MatmulConfig("skinny", 8, 32, 256, num_warps=2, num_stages=8)
    if bucket == 16:
        return MatmulConfig("skinny", 16, 64, 128, num_warps=4, num_stages=8, parts=parts)
    block_k = 256 if K % (256 * parts) == 0 else 128
    return MatmulConfig("skinny", 8, 16, block_k, num_warps=1, num_stages=5, parts=parts)


def _early(bucket: int) -> MatmulConfig:
    """A program has all weights of 32 columns on their way before rows are there."""
    return MatmulConfig("early", max(bucket, 8), 32, 32, num_warps=4, splits=16)


def _is_early(N: int, K: int) -> bool:
    return N % 32 == 0 and K % 512 == 0 and 32 * K * 2 <= EARLY_BYTES


def _first_through(bucket: int, N: int, K: int, parts_allowed: bool) -> MatmulConfig:
    """The tiles that are through first: multiprocessors take them in rounds, of which the last may be nearly empty."""
    best, least = None, math.inf
    for tile in _TILES:
        if not tile.least <= bucket <= tile.most:
            continue
        divided = parts_allowed and bucket <= 512 and tile.config.kernel != "hopper"
        for parts in PARTS if divided else (1,):
            us = _microseconds(tile, parts, bucket, N, K)
            if us < least and (parts == 1 or K % (parts * tile.config.block_k) == 0):
                best, least = replace(tile.config, parts=parts), us
    assert best is not None
    return best


def _microseconds(tile: _Tile, parts: int, num_rows: int, N: int, K: int) -> float:
    tiles = cdiv(num_rows, tile.config.height) * cdiv(N, tile.config.width) * parts
    us = cdiv(tiles, _MULTIPROCESSORS) * (tile.us_by_k * K / parts / 1024 + tile.us)
    return us + us_of_parts(parts, num_rows, N)


def us_of_parts(parts: int, num_rows: int, N: int) -> float:
    """What it takes to add them, of K divided among programs."""
    return 0.0 if parts == 1 else parts * (_US_OF_PART + num_rows * N * 4 / _BYTES_IN_US)
