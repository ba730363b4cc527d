"""The largest logits of each part of a row, its candidates: what searches for a row's best look at in its place.

One pass, many programs a row, no sort. Knows logits as integers that order like them; what is sought among candidates
is in `allowed.py` and `log_probabilities.py`.

Shape suffixes: R rows, P parts of the vocabulary, C candidates of a part at most.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.tiles import cdiv

SIDE: tl.constexpr = tl.constexpr(4)
"""Logits side by side, which are candidates together: a quarter of the work to write them down."""
CANDIDATES: tl.constexpr = tl.constexpr(64)
_FIELDS: tl.constexpr = tl.constexpr(64)
_FIELD: tl.constexpr = tl.constexpr(32)
"""Groups of a field, whose maximum stands for them. A part has _FIELDS of these."""
_TAKEN: tl.constexpr = tl.constexpr(24)
"""Fields of a part with a candidate. Of logits in no order 0.37 % of the part lie above the least of those, some 30."""

UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of fp32 that a type never uses: keys may be shifted by so many without two numbers meeting."""


class Candidates(NamedTuple):
    """Of each row and part, groups of SIDE logits."""

    ids_RPC: Tensor
    """A group begins at SIDE times this."""
    counts_RP: Tensor
    from_RP: Tensor
    """From this shifted key on, a part's candidates are all that it has."""


def empty_candidates(num_rows: int, vocab_size: int, device: torch.device) -> Candidates:
    """Room for them."""
    shape = num_rows, cdiv(vocab_size, SIDE.value * _FIELDS.value * _FIELD.value)
    ids_RPC = torch.empty(*shape, CANDIDATES.value, dtype=torch.int32, device=device)
    return Candidates(ids_RPC, *(torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2)))


@triton.jit
def order_key(x):
    """int32 that orders like the fp32 `x`, both zeros alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_logits(row_ptr, ids, V: tl.constexpr):
    """Logits of token ids of 0 and more, fp32; -inf outside the vocabulary and for what is no number."""
    x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def first_possible_key(SHIFT: tl.constexpr):
    """The smallest shifted key of a logit over -inf."""
    return (order_key(tl.full([], float("-inf"), tl.float32)) >> SHIFT) + 1


@triton.jit
def part_groups(part):
    """The groups of a part."""
    return part * (_FIELDS * _FIELD) + tl.arange(0, _FIELDS * _FIELD)


@triton.jit
def ids_of(groups):
    """Token ids of groups: [..., SIDE]."""
    return groups[:, None] * SIDE + tl.arange(0, SIDE)[None, :]


@triton.jit
def leave_candidates(groups, key, ids_ptr, counts_ptr, from_ptr, cell, SHIFT: tl.constexpr):
    """Write down those groups of a part, with keys [groups, SIDE], that reach some shifted key, in order; and that key.

    It is the least of the _TAKEN largest maxima of fields, or, where that leaves more than there is room for, the
    smallest that does not. What is impossible (-inf) does not reach it.
    """
    best = tl.max(key, axis=1)
    maxima = tl.max(tl.reshape(best, (_FIELDS, _FIELD)), axis=1)
    num_larger = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), axis=1)
    start = tl.min(tl.where(num_larger < _TAKEN, maxima, 0x7FFFFFFF))
    start = tl.maximum(start, first_possible_key(SHIFT))
    count = tl.sum((best >= start).to(tl.int32))
    if count > CANDIDATES:
        low, high = start.to(tl.int64), tl.max(maxima).to(tl.int64) + 1
        while high - low > 1:
            middle = low + (high - low) // 2
            if tl.sum((best >= middle.to(tl.int32)).to(tl.int32)) > CANDIDATES:
                low = middle
            else:
                high = middle
        start = high.to(tl.int32)
        count = tl.sum((best >= start).to(tl.int32))
    chosen = (best >= start).to(tl.int32)
    place = tl.cumsum(chosen, axis=0) - 1
    tl.store(ids_ptr + cell.to(tl.int64) * CANDIDATES + place, groups, mask=chosen > 0)
    tl.store(counts_ptr + cell, count)
    tl.store(from_ptr + cell, start)


@triton.jit
def load_candidates(ids_ptr, counts_ptr, from_ptr, row, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Of all parts of a row: token ids [BLOCK_P * C, SIDE], those of no group beyond every vocabulary; and the shifted
    key from which on no other token of the row has one."""
    place = tl.arange(0, BLOCK_P * CANDIDATES)
    part = place // CANDIDATES
    cell = row * P + part
    there = place % CANDIDATES < tl.load(counts_ptr + cell, mask=part < P, other=0)
    groups = tl.load(ids_ptr + row.to(tl.int64) * (P * CANDIDATES) + place, mask=there, other=0x7FFFFFF)
    parts = tl.arange(0, BLOCK_P)
    return ids_of(groups), tl.max(tl.load(from_ptr + row * P + parts, mask=parts < P, other=-(2**31)))
