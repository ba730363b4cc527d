"""How a product ends whose columns are logits: the best score of each row of the tile, and its token id.

Logits stay in registers, rounded as if they had been in memory; a score is made of one as `sample.py` makes it. So a
row's token is the same whether its step had logits in memory or not. Knows no product; `sample_shard.py` merges tiles.

Shape suffixes: M rows, N output columns, R rows of a step, P tiles of the vocabulary.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.noise import gumbel, row_keys
from tercet.triton_kernels.slot_table import MAX_STOP_IDS

_INTERPRETED = tl.constexpr(INTERPRETED)
_STOP_IDS = tl.constexpr(MAX_STOP_IDS)


class Draw(NamedTuple):
    """What a product needs to know to draw, for its kernel."""

    slots: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor
    min_length: Tensor
    stop_ids: Tensor
    scores: Tensor
    """Of the best of each row and tile: fp32 [R, P]."""
    ids: Tensor
    """Its token id, int32 [R, P]."""
    turn: Tensor
    """The ring's, which moves on by one of `depth`."""
    num_tiles: int
    num_slots: int
    depth: int
    first: int
    """The token id of column 0."""
    end: int
    """The id after the last; columns behind it are padding."""
    smallest_temperature: float


@triton.jit
def load_rows(draw, rows, M):
    """Of each row the slot whose stop ids are banned (-1: none), 1 / temperature (0: greedy), seed and position.

    The plan and the slot table are ready before the layers begin (`embedding` is a border): no wait is needed.
    """
    slots = tl.load(draw.slots + rows, mask=rows < M, other=-1)
    positions = tl.load(draw.positions + rows, mask=rows < M, other=-1)
    samples = (positions >= 0) & (slots >= 0) & (slots < draw.num_slots)
    temperature = tl.load(draw.temperature + slots, mask=samples, other=0.0)
    inverse = 1.0 / tl.maximum(temperature, draw.smallest_temperature)
    inverse = tl.where(temperature >= draw.smallest_temperature, inverse, 0.0)
    banned = samples & (positions < tl.load(draw.min_length + slots, mask=samples, other=0))
    return tl.where(banned, slots, -1), inverse, tl.load(draw.seed + slots, mask=samples, other=0), positions


@triton.jit
def _perturbed(score, token_id, inverse, key_1, key_2):
    return tl.where(inverse > 0, tl.fma(score, inverse, gumbel(token_id, key_1, key_2)), score)


@triton.jit
def draw_tile(acc_MN, facts, rows, start_n, tile, draw, M, BLOCK_N: tl.constexpr, LOGIT: tl.constexpr):
    """Write each row's best score among the tile's columns and the lowest id that has it. `LOGIT`: type of a logit.

    What a row that samples nothing writes means nothing.
    """
    banning, inverse, seeds, positions = facts
    ids = draw.first + start_n + tl.arange(0, BLOCK_N)
    score = acc_MN.to(LOGIT).to(tl.float32)
    # NaN is never the best.
    score = tl.where((ids < draw.end)[None, :] & (score == score), score, float("-inf"))
    if tl.max(banning, 0) >= 0:
        for e in range(_STOP_IDS):
            stop = tl.load(draw.stop_ids + banning * _STOP_IDS + e, mask=banning >= 0, other=-1)
            score = tl.where(ids[None, :] == stop[:, None], float("-inf"), score)
    if tl.max(inverse, 0) > 0:
        key_1, key_2 = row_keys(seeds, positions)
        if _INTERPRETED:
            score = _perturbed(score, ids[None, :], inverse[:, None], key_1[:, None], key_2[:, None])
        else:
            # Number by number: as a chain of operations on whole tiles it takes several times a tile's registers.
            score = tl.map_elementwise(
                _perturbed, score, ids[None, :], inverse[:, None], key_1[:, None], key_2[:, None]
            )
    top = tl.max(score, 1)
    best = tl.min(tl.where(score == top[:, None], ids[None, :], draw.end - 1), 1)
    places = rows.to(tl.int64) * draw.num_tiles + tile
    tl.store(draw.scores + places, top, mask=rows < M)
    tl.store(draw.ids + places, tl.minimum(best, draw.end - 1), mask=rows < M)
