"""Which configurations the tuners try for a product.

Knows sizes and kernels; runs nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import triton

from matmul_products import NORMED, Product
from tercet.triton_kernels.matmul_config import ASKING, EARLY_BYTES, PLAIN_ORDER, MatmulConfig
from tercet.triton_kernels.matmul_launch import can_divide, fits_early
from tercet.triton_kernels.tuning import ROW_BUCKETS, row_bucket

_SHARED_BYTES = 227 * 1024
_MULTIPROCESSORS = 132
_SOME = 256
"""Columns of weights to ask for ahead, where it is not all of them."""


def candidates(product: Product, num_rows: int) -> list[MatmulConfig]:
    """What may be fast for this product and this many rows, of every family that may be."""
    if product.draws:  # with the bits of the logits, by kernels that can draw
        return [one for one in _all(product, num_rows) if one.kernel in PLAIN_ORDER and one.kernel != "hopper"]
    return _all(product, num_rows)


def _all(product: Product, num_rows: int) -> list[MatmulConfig]:
    N, K = product.N, product.K
    found: list[MatmulConfig] = []
    early = list(early_candidates(num_rows, N, K)) if num_rows <= 16 else []
    if product.normed and num_rows > 1:
        return early + list(_splits(max(num_rows, 8), N, K)) if num_rows <= 64 else []
    if num_rows == 1:  # without vectors a single row is served as eight are
        return early + list(_vectors(K, 2 if product.epilogue == "gate" else 1))
    found += early
    if num_rows <= 64:
        found += _splits(max(num_rows, 8), N, K)
        found += _skinny(max(num_rows, 8), N, K)
    if 32 <= num_rows <= 1024:
        found += _waves(num_rows, N, K)
    if num_rows >= 128 or (num_rows >= 64 and N > 50000):
        found += _hopper(num_rows, N)
    if num_rows >= 512 or (num_rows >= 64 and N > 50000):
        found += _persistent(num_rows)
    return found


def near_candidates(
    product: Product, num_rows: int, table: Mapping[str, Mapping[int, MatmulConfig]], *, divided: bool
) -> list[MatmulConfig]:
    """What won for other weights and about as many rows. `divided`: by parts of K too, as what comes next adds them.

    For few rows also programs that have all their weights at once, whose sizes go with the weights'.
    """
    place = ROW_BUCKETS.index(row_bucket(num_rows))
    near = ROW_BUCKETS[max(place - 1, 0) : place + 2]
    won = {
        replace(config, parts=1, prefetch=0)
        for key, buckets in table.items()
        if key.endswith(" default") and key.startswith(NORMED) == product.normed and "sample" not in key
        for bucket, config in buckets.items()
        if bucket in near and config.kernel != "apart" and (config.kernel != "vector" or num_rows == 1)
    }
    if num_rows <= 16:
        won.update(early_candidates(num_rows, product.N, product.K))
    if num_rows >= 128:
        won.update(_hopper(num_rows, product.N))
    if 32 <= num_rows <= 512:
        waves = [one for one in _waves(num_rows, product.N, product.K) if one.block_k == 64 and not one.prefetch]
        won.update({replace(one, num_stages=0): one for one in waves}.values())  # of each tile the most stages
    all_parts = (1, 2, 3, 4) if divided and 1 < num_rows <= 512 else (1,)
    found = {replace(config, parts=parts) for config in won for parts in all_parts}
    return sorted((config for config in found if _fills(config, num_rows, product)), key=repr)


def asking_ahead(config: MatmulConfig, num_rows: int, K: int) -> list[MatmulConfig]:
    """The same in the other ways to ask the L2 cache for weights, if the kernel can."""
    if config.kernel not in ASKING or num_rows > 512:
        return []
    return [replace(config, prefetch=columns) for columns in _ahead(K) if columns != config.prefetch]


def _fills(config: MatmulConfig, num_rows: int, product: Product) -> bool:
    """Whether the kernel can do it, and most multiprocessors have a tile all the time; small tiles do that anyway."""
    if num_rows > config.height and num_rows % config.height:
        return False  # a tile that is partly outside takes longer than a whole one
    if config.parts > 1 and not can_divide(config, product.K):
        return False
    if config.kernel == "early":
        return fits_early(config, num_rows, product.N, product.K, config.parts)
    if product.normed:
        return num_rows <= 16
    if config.width * config.height < 8192 or product.N > 50000:
        return True
    tiles = -(-num_rows // config.height) * -(-product.N // config.width) * config.parts
    return tiles / (-(-tiles // _MULTIPROCESSORS) * _MULTIPROCESSORS) >= 0.72


def early_candidates(num_rows: int, N: int, K: int) -> Iterator[MatmulConfig]:
    """Programs that have all their weights at once: about as many as there are multiprocessors, or some times that."""
    rows = 8 if num_rows <= 8 else 16
    for width, block_n, extra in ((16, 16, False), (32, 32, False), (48, 32, True), (64, 64, False), (96, 64, True)):
        if N % width or width * K * 2 > EARLY_BYTES or not 48 <= N // width <= 6 * _MULTIPROCESSORS:
            continue
        for block_k in (32, 64):
            for warps in (4, 8):
                # In registers of a lane: a warp's weights, and its numbers of all rows.
                held, numbers = width * K // warps // 64, rows * K // warps // 64
                chunks = next((size for size in (64, 32, 16, 8) if K % (size * block_k) == 0), 0)
                chunks = min(chunks, 4 * warps)
                if chunks < warps or K % (chunks * block_k) or numbers > 96:
                    continue
                for hold in (True, False) if held + numbers <= 160 else (False,):
                    yield MatmulConfig("early", rows, block_n, block_k, warps, splits=chunks, extra=extra, hold=hold)


def _vectors(K: int, least: int) -> Iterator[MatmulConfig]:
    power = triton.next_power_of_2(K)
    for block_n in (size for size in (1, 2, 4, 8, 16) if size >= least):
        for block_k in {min(power, size) for size in (1024, 2048, 4096)}:
            for warps in (1, 2, 4, 8):
                if 16 <= block_n * block_k // (32 * warps) <= 256:
                    yield MatmulConfig("vector", 1, block_n, block_k, warps)


def _splits(rows: int, N: int, K: int) -> Iterator[MatmulConfig]:
    for block_m in {rows, 16, 32} if rows > 16 else {rows}:
        if block_m > rows:
            continue
        for block_n in (16, 32, 64) if N > 2048 else (16,):
            for splits, block_k in ((2, 128), (4, 64), (4, 128), (8, 64), (8, 128), (4, 256)):
                if block_m * block_n > 2048 or (N > 50000 and block_n == 16):
                    continue
                warps = splits * (2 if block_n == 64 and splits == 2 else 1)
                step = splits * block_k
                if step >= K:
                    continue
                for stages in (3, 5):
                    shared = stages * step * (block_n + block_m) * 2
                    if shared <= _SHARED_BYTES:
                        for prefetch in _ahead(K):
                            yield MatmulConfig(
                                "split", block_m, block_n, block_k, warps, stages, splits, prefetch=prefetch
                            )
            if rows <= 16:
                yield from _whole(rows, block_n, K)


def _whole(rows: int, block_n: int, K: int) -> Iterator[MatmulConfig]:
    """All weights of a program loaded at once, before anything is waited for."""
    power = triton.next_power_of_2(K)
    if power * (block_n + rows) * 2 > _SHARED_BYTES:
        return
    for splits in (4, 8, 16):
        for warps in {splits, splits // 2}:
            if 64 <= power // splits <= 512 and warps >= 4:
                for prefetch in _ahead(K):
                    yield MatmulConfig("split", rows, block_n, power // splits, warps, 1, splits, prefetch=prefetch)


def _ahead(K: int) -> tuple[int, ...]:
    """Columns that the L2 cache may be asked for ahead: none, some, all."""
    return (0, _SOME, K) if K > _SOME else (0, K)


def _skinny(rows: int, N: int, K: int) -> Iterator[MatmulConfig]:
    for block_m in {rows, rows // 2, rows // 4} if rows > 16 else {rows}:
        for block_n in (16, 32, 64, 128):
            if N // block_n < 32 or (N > 50000 and block_n == 16):
                continue
            for block_k in (64, 128, 256):
                for stages in (3, 5, 8):
                    shared = stages * block_k * (block_n + block_m) * 2
                    if shared > _SHARED_BYTES or (block_n < 32 and stages == 3):
                        continue
                    for warps in {max(block_n // 16, 1), 4 if block_n * block_m >= 512 else 1, 2 if rows > 16 else 1}:
                        for prefetch in _ahead(K):
                            yield MatmulConfig("skinny", block_m, block_n, block_k, warps, stages, prefetch=prefetch)


def _waves(num_rows: int, N: int, K: int) -> Iterator[MatmulConfig]:
    for block_m, tall in ((64, False), (128, False), (128, True), (256, False)):
        height = block_m * 3 // 2 if tall else block_m
        # A tall tile is for rows that it holds without padding.
        if height > max(triton.next_power_of_2(num_rows), 64) or (tall and num_rows % height):
            continue
        for block_n in (32, 64, 128, 256):
            for extra in (False, True):
                width = block_n * 3 // 2 if extra else block_n
                if height * width > 256 * 192:
                    continue
                tiles = -(-num_rows // height) * -(-N // width)
                if tiles < 32 or tiles > 8 * _MULTIPROCESSORS:
                    if N < 50000:
                        continue
                    if height * width < 128 * 128:
                        continue
                waves = -(-tiles // _MULTIPROCESSORS)
                if (
                    tiles > 0.4 * _MULTIPROCESSORS
                    and tiles / (waves * _MULTIPROCESSORS) < 0.6
                    and height * width > 8192
                ):
                    continue
                yield from _wave(num_rows, K, MatmulConfig("wave", block_m, block_n, 0, 0, extra=extra, tall=tall))


def _wave(num_rows: int, K: int, tile: MatmulConfig) -> Iterator[MatmulConfig]:
    """The ways to load a tile."""
    for block_k in (64, 128):
        for stages in (3, 4, 6):
            shared = stages * block_k * (tile.height + tile.width) * 2
            if shared > _SHARED_BYTES - 2048 or (block_k == 128 and stages == 6):
                continue
            if stages == 3 and shared < 100 * 1024:
                continue
            for warps in (4, 8):
                if warps == 8 and tile.block_m == 64:
                    continue
                if warps == 4 and tile.height * tile.width > 128 * 128:
                    continue
                for prefetch in _ahead(K) if num_rows <= 256 else (0,):
                    yield replace(tile, block_k=block_k, num_warps=warps, num_stages=stages, prefetch=prefetch)


def _persistent(num_rows: int) -> Iterator[MatmulConfig]:
    for block_m, block_n, block_k, warps, all_stages in (
        (128, 256, 64, 8, (3, 4)),
        (256, 128, 64, 8, (3, 4)),
        (128, 128, 64, 8, (4, 5)),
        (128, 128, 64, 4, (4, 5)),
        (128, 256, 128, 8, (2,)),
    ):
        if block_m > triton.next_power_of_2(num_rows):
            continue
        for stages in all_stages:
            for group in (4, 8, 16) if num_rows > 512 else (8,):
                yield MatmulConfig("persistent", block_m, block_n, block_k, warps, stages, group_m=group)


def _hopper(num_rows: int, N: int) -> Iterator[MatmulConfig]:
    for block_m, block_n in ((128, 256), (256, 128), (128, 128), (128, 64), (256, 64)):
        if block_m > triton.next_power_of_2(num_rows) or (num_rows > 1024 and block_n == 64):
            continue
        tiles = -(-num_rows // block_m) * -(-N // block_n)
        if tiles < 48:
            continue
        for block_k in (64, 128):
            stage = block_k * (block_m + block_n) * 2
            stages = min((_SHARED_BYTES - 1024 - block_m * block_n) // stage, 8)
            if stages >= 2:
                for group in (4, 8, 16) if num_rows > 512 else (8,):
                    yield MatmulConfig("hopper", block_m, block_n, block_k, 4, stages, group_m=group)
