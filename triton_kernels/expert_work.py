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

_FEW = 1024
"""Up to so many pairs each program finds out by itself where its own go; of more they are counted ahead, by blocks."""
_BLOCK_OF_FEW, _BLOCK = 64, 128
"""Pairs that one program deals out."""
_COMPARED = tl.constexpr(2048)
"""Couples of pairs that a program compares at once."""
_MANY = tl.constexpr(512)
"""Pairs that it counts at once."""
_COLUMNS, _ROWS = 32, 64
"""Experts whose counts one program adds up, and blocks at once."""
_SPAN = tl.constexpr(4)
"""Places that are cleared at once."""


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


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["num_pairs"])
def _count_kernel(
    experts_ptr, counts_ptr, num_pairs, E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """Grid (B,): one program counts what each expert has of its block of pairs."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1)
    counts = tl.histogram(experts, BLOCK_E, mask=(experts >= 0) & (experts < E))
    columns = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + block * E + columns, counts, mask=columns < E)


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["num_blocks"])
def _add_up_kernel(
    counts_ptr, num_blocks, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (experts / COLUMNS,): one program puts in place of counts those of all blocks ahead, and behind the last
    block those of all."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    so_far = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_blocks, ROWS):
        blocks = first + tl.arange(0, ROWS)
        pointers = counts_ptr + blocks[:, None] * E + columns[None, :]
        there = (blocks < num_blocks)[:, None] & (columns < E)[None, :]
        counts = tl.load(pointers, mask=there, other=0)
        tl.store(pointers, so_far[None, :] + tl.cumsum(counts, 0) - counts, mask=there)
        so_far += tl.sum(counts, 0)
    tl.store(counts_ptr + num_blocks * E + columns, so_far, mask=columns < E)


@triton.jit
def _count_all(experts_ptr, num_pairs, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Of each expert, how many of all pairs it has."""
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_pairs, _MANY):
        pairs = first + tl.arange(0, _MANY)
        experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1)
        counts += tl.histogram(experts, BLOCK_E, mask=(experts >= 0) & (experts < E))
    return counts


@triton.jit
def _count_ahead(experts_ptr, experts, pairs, begin, end):
    """Of each of these pairs, how many of the same expert are ahead of it among those from `begin` to `end`."""
    SOME: tl.constexpr = _COMPARED // experts.shape[0]
    same = tl.zeros([experts.shape[0], SOME], tl.int32)
    for first in range(begin, end, SOME):
        others = first + tl.arange(0, SOME)
        their_experts = tl.load(experts_ptr + others, mask=others < end, other=-1)
        same += ((experts[:, None] == their_experts[None, :]) & (others[None, :] < pairs[:, None])).to(tl.int32)
    return tl.sum(same, 1)


@triton.jit
def _name_tiles(tile_experts_ptr, first_tiles, tiles, num_tiles, BLOCK_E: tl.constexpr):
    """Write each tile's expert."""
    columns = tl.arange(0, BLOCK_E)
    for index in range(tl.max(tiles)):
        tl.store(tile_experts_ptr + first_tiles + index, columns, mask=index < tiles)
    for empty in range(tl.sum(tiles), num_tiles, BLOCK_E):
        tl.store(tile_experts_ptr + empty + columns, -1, mask=empty + columns < num_tiles)


@triton.jit
def _clear_ends(pairs_ptr, totals, first_tiles, TILE: tl.constexpr):
    """Write that nobody is in the places behind an expert's last pair."""
    used = totals % TILE
    begins = first_tiles * TILE + totals - used
    for first in tl.static_range(0, TILE, _SPAN):
        places = first + tl.arange(0, _SPAN)
        free = (used > 0)[:, None] & (places[None, :] >= used[:, None])
        tl.store(pairs_ptr + begins[:, None] + places[None, :], -1, mask=free)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"], do_not_specialize_on_alignment=["num_pairs", "num_tiles"])
def _deal_kernel(
    experts_ptr, counts_ptr, pairs_ptr, tile_experts_ptr, num_pairs, num_tiles, E: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B + 2,): one program deals out a block of pairs; the last two name tiles and clear their ends. COUNTED:
    `counts_ptr` has what `_add_up_kernel` leaves."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0) - 2
    columns = tl.arange(0, BLOCK_E)
    if COUNTED:
        totals = tl.load(counts_ptr + num_blocks * E + columns, mask=columns < E, other=0)
    else:
        totals = _count_all(experts_ptr, num_pairs, E, BLOCK_E)
    tiles = (totals + TILE - 1) // TILE
    first_tiles = tl.cumsum(tiles, 0) - tiles
    if block == num_blocks:
        _name_tiles(tile_experts_ptr, first_tiles, tiles, num_tiles, BLOCK_E)
    elif block == num_blocks + 1:
        _clear_ends(pairs_ptr, totals, first_tiles, TILE)
    else:
        pairs = block * BLOCK + tl.arange(0, BLOCK)
        experts = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1)
        real = (experts >= 0) & (experts < E)
        experts = tl.where(real, experts, 0)
        ahead = tl.zeros([BLOCK], tl.int32)
        begin = 0
        if COUNTED:
            ahead = tl.load(counts_ptr + block * E + experts)
            begin = block * BLOCK
        ahead += _count_ahead(experts_ptr, experts, pairs, begin, tl.minimum(block * BLOCK + BLOCK, num_pairs))
        tl.store(pairs_ptr + tl.gather(first_tiles, experts, 0) * TILE + ahead, pairs, mask=real)


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
            counts_BE = experts_TK.new_empty(num_blocks + 1, num_experts)
            _count_kernel[(num_blocks,)](experts_TK, counts_BE, num_pairs, **sizes, **options | {"num_warps": 4})
            _add_up_kernel[(cdiv(num_experts, _COLUMNS),)](
                counts_BE, num_blocks, E=num_experts, ROWS=_ROWS, COLUMNS=_COLUMNS, **options
            )
        _deal_kernel[(num_blocks + 2,)](
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
