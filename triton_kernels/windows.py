"""Where attention of a row's newest token begins in the cache, in layers that see no more than a window.

Plans and kernels both ask here, so that they agree. A window is of at least two positions, the newest token's own
included: so of the tiles from the first on each has a token that is seen. A window of 0 is none.
"""

import triton
import triton.language as tl


@triton.jit
def first_seen(known, WINDOW: tl.constexpr):
    """The first position in the cache, which has `known` tokens, that is seen."""
    return tl.maximum(known + 1 - WINDOW, 0)


@triton.jit
def first_tile(known, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The tile with the first position that is seen."""
    tile = 0
    if WINDOW > 0:
        tile = first_seen(known, WINDOW) // TILE
    return tile


def most_tiles(tokens: int, tile: int, window: int) -> int:
    """Tiles of which something is seen, at most, in a cache of so many tokens: a window begins anywhere in one."""
    tiles = -(-tokens // tile)
    return min(tiles, (window - 1 + tile - 2) // tile + 1) if window else tiles
