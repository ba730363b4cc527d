"""How a step's tokens are dealt out to their experts: pairs of a token and an expert, sorted by expert, in tiles.

A pair's number is its place in `route`'s tables: token * K + which of the token's experts. Pairs of one expert come in
the order of their tokens and begin with a tile of their own. Where there are few for so many experts, each pair has a
tile: that takes no sorting, and hardly any two are of the same expert. With tiles of one place nothing is dealt out at
all. Knows no weights; `matmul_experts.py` walks over tiles.

Shape suffixes: T tokens, E experts, K experts of a token, B blocks of pairs, Q places in tiles, N tiles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_indices
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_FEW = 8192
"""Up to so many pairs each program counts them all by itself; of more each counts its own ahead, for all."""
_BLOCK_OF_FEW, _BLOCK = 64, 256
"""Pairs that one program deals out."""
_SOME = tl.constexpr(64)
"""Pairs that it deals out at once, and rows of counts that it adds up."""
_MANY = tl.constexpr(2048)
"""Pairs that it counts at once."""


@dataclass(frozen=True)
class ExpertWork:
    """Tiles of pairs; what is in them is on the device."""

    pairs_Q: Tensor | None
    """int32, tile after tile; -1: nobody. None: each tile has the pair of its number."""
    experts_N: Tensor
    """Each tile's expert, int32; one that there is not, -1 where tiles are sorted: an empty tile."""
    tile: int
    """Places of one tile."""
    num_experts: int


@triton.jit
def _count(experts_ptr, start, end, E: tl.constexpr, BLOCK_E: tl.constexpr, SOME: tl.constexpr):
    """Of each expert, how many of these pairs it has."""
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(start, end, SOME):
        pairs = first + tl.arange(0, SOME)
        experts = tl.load(experts_ptr + pairs, mask=pairs < end, other=-1)
        counts += tl.histogram(experts, BLOCK_E, mask=(experts >= 0) & (experts < E))
    return counts


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["num_pairs"])
def _count_kernel(
    experts_ptr, counts_ptr, num_pairs, E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """Grid (B,): one program counts what each expert has of its block of pairs."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    counts = _count(experts_ptr, block * BLOCK, tl.minimum((block + 1) * BLOCK, num_pairs), E, BLOCK_E, BLOCK)
    columns = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + block * E + columns, counts, mask=columns < E)


@triton.jit
def _name_tiles(
    pairs_ptr, tile_experts_ptr, totals, ends, num_tiles, E: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Write each tile's expert, and that nobody is in the places behind an expert's last pair.

    `totals`: pairs of each expert; `ends`: the tile behind its last.
    """
    columns = tl.arange(0, BLOCK_E)
    used = tl.max(ends)
    for first in range(0, num_tiles, _SOME):
        tiles = first + tl.arange(0, _SOME)
        experts = tl.sum((ends[None, :] <= tiles[:, None]).to(tl.int32), 1)
        tl.store(tile_experts_ptr + tiles, tl.where(tiles < used, experts, -1), mask=tiles < num_tiles)
    for behind in range(TILE - 1):
        place = totals % TILE + behind
        last = (columns < E) & (totals % TILE > 0) & (place < TILE)
        tl.store(pairs_ptr + (ends - 1) * TILE + place, -1, mask=last)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"], do_not_specialize_on_alignment=["num_pairs", "num_tiles"])
def _deal_kernel(
    experts_ptr, counts_ptr, pairs_ptr, tile_experts_ptr, num_pairs, num_tiles, E: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B + 1,): one program deals out a block of pairs; the last names the tiles. COUNTED: blocks have been."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0) - 1
    start = block * BLOCK
    columns = tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], tl.int32)  # of each expert, pairs in blocks ahead of this one
    if COUNTED:
        totals = tl.zeros([BLOCK_E], tl.int32)
        for first in range(0, num_blocks, _SOME):
            blocks = first + tl.arange(0, _SOME)
            there = (blocks < num_blocks)[:, None] & (columns < E)[None, :]
            counts = tl.load(counts_ptr + blocks[:, None] * E + columns[None, :], mask=there, other=0)
            totals += tl.sum(counts, 0)
            before += tl.sum(tl.where((blocks < block)[:, None], counts, 0), 0)
    else:
        totals = _count(experts_ptr, 0, num_pairs, E, BLOCK_E, _MANY)
        before += _count(experts_ptr, 0, tl.minimum(start, num_pairs), E, BLOCK_E, _MANY)
    tiles = (totals + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    if block == num_blocks:
        _name_tiles(pairs_ptr, tile_experts_ptr, totals, ends, num_tiles, E, TILE, BLOCK_E)
    else:
        places = (ends - tiles) * TILE + before
        some = tl.arange(0, _SOME)
        for first in range(start, tl.minimum(start + BLOCK, num_pairs), _SOME):
            pairs = first + some
            experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=E)
            alike = (experts[:, None] == experts[None, :]) & (some[None, :] < some[:, None])
            has = ((experts[:, None] == columns[None, :]) & (columns < E)[None, :]).to(tl.int32)
            place = tl.sum(has * places[None, :], 1) + tl.sum(alike.to(tl.int32), 1)
            tl.store(pairs_ptr + place, pairs, mask=(experts >= 0) & (experts < E))
            places += tl.sum(has, 0)


@triton.jit
def _part_kernel(
    experts_ptr, pairs_ptr, tile_experts_ptr, E: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (pairs,): one program gives a pair a tile."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    pair = tl.program_id(0)
    expert = tl.load(experts_ptr + pair)
    tl.store(tile_experts_ptr + pair, tl.where((expert >= 0) & (expert < E), expert, -1))
    places = tl.arange(0, TILE)
    tl.store(pairs_ptr + pair * TILE + places, tl.where(places == 0, pair, -1))


def deal_out(experts_TK: Tensor, num_experts: int, tile: int) -> ExpertWork:
    """Sort pairs by expert into tiles of `tile` places, or leave each as it is, in one. `experts_TK` as from `route`.
    Graph-safe, without atomics."""
    check_indices("experts", experts_TK, experts_TK, None, None)
    if tile == 1:
        return ExpertWork(None, experts_TK.flatten(), tile, num_experts)
    num_pairs = experts_TK.numel()
    num_tiles = most_tiles(num_pairs, num_experts, tile)
    if not use_kernels(experts_TK):
        return deal_out_reference(experts_TK, num_experts, tile)
    pairs_Q = experts_TK.new_empty(num_tiles * tile)
    tile_experts_N = experts_TK.new_empty(num_tiles)
    if num_tiles and _are_few(num_pairs, num_experts):
        _part_kernel[(num_pairs,)](
            experts_TK, pairs_Q, tile_experts_N, E=num_experts, TILE=tile, num_warps=1, **overlap_options(experts_TK)
        )
    elif num_pairs:
        counted = num_pairs > _FEW
        block = _BLOCK if counted else _BLOCK_OF_FEW
        num_blocks = cdiv(num_pairs, block)
        sizes = {"E": num_experts, "BLOCK": block, "BLOCK_E": next_power_of_2(num_experts)}
        options = {"num_warps": 8, **overlap_options(experts_TK)}
        counts_BE = experts_TK  # for its type
        if counted:
            counts_BE = experts_TK.new_empty(num_blocks, num_experts)
            _count_kernel[(num_blocks,)](experts_TK, counts_BE, num_pairs, **sizes, **options)
        _deal_kernel[(num_blocks + 1,)](
            experts_TK, counts_BE, pairs_Q, tile_experts_N, num_pairs, num_tiles, TILE=tile, COUNTED=counted, **sizes,
            **options,
        )  # fmt: skip
    return ExpertWork(pairs_Q, tile_experts_N, tile, num_experts)


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """How many tiles there can be: each has a pair, and each expert at most one that is not full."""
    return min(num_pairs, num_pairs // tile + num_experts)


def _are_few(num_pairs: int, num_experts: int) -> bool:
    return 4 * num_pairs <= num_experts


def deal_out_reference(experts_TK: Tensor, num_experts: int, tile: int) -> ExpertWork:
    """The same in PyTorch."""
    experts_P = experts_TK.flatten()
    num_tiles = most_tiles(len(experts_P), num_experts, tile)
    pairs_Q = experts_P.new_full((num_tiles * tile,), -1)
    tile_experts_N = experts_P.new_full((num_tiles,), -1)
    if _are_few(len(experts_P), num_experts):
        pairs_Q[::tile] = torch.arange(num_tiles, device=pairs_Q.device)
        tile_experts_N = torch.where((experts_P >= 0) & (experts_P < num_experts), experts_P, tile_experts_N)
        return ExpertWork(pairs_Q, tile_experts_N, tile, num_experts)
    used = 0
    for expert in range(num_experts):
        pairs = (experts_P == expert).nonzero().squeeze(1)
        count = cdiv(len(pairs), tile)
        pairs_Q[used * tile : used * tile + len(pairs)] = pairs
        tile_experts_N[used : used + count] = expert
        used += count
    return ExpertWork(pairs_Q, tile_experts_N, tile, num_experts)
