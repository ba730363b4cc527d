"""What prefill attention on any GPU does with one tile of keys and values: loads, scores and sums.

Shape suffixes: D head size.
"""

import triton
import triton.language as tl


@triton.jit
def load_cells(cache, cell, tokens, columns, D: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """The cells from `cell` on: one tile of keys or values."""
    if TMA:
        tile = cache.load([cell.to(tl.int32), 0])
    else:
        pointers = cache + (cell + tokens)[:, None] * D + columns[None, :]
        tile = tl.load(pointers) if D == BLOCK_D else tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tile


@triton.jit
def _score(products, scale, softcap, slope, distances, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in units of log 2 from products, where the score is more than the scaled product.

    Products that are added to are fused by hand. Left to itself the compiler fuses some elements of a tile one way and
    some another, and a row's bits follow from where in a tile it stands: from how its prompt was cut into chunks.
    """
    if SOFTCAP:
        cap = softcap * 1.4426950408889634
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        shares = 1 / (tl.exp2(products * (2 * 1.4426950408889634 * scale / softcap)) + 1)
        scores = tl.fma(shares, -2 * cap, cap)
    else:
        scores = products * (scale * 1.4426950408889634)
    if ALIBI:
        scores = tl.fma(distances.to(tl.float32), slope * 1.4426950408889634, scores)
    return scores


@triton.jit
def attend(
    q, k, v, largest, weight, acc, positions, queries, last_seen, length, scale, softcap, slope,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over one more tile of keys and values: the same bits, masked or not, where a query sees it whole."""
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP or ALIBI:
        scores = _score(scores, scale, softcap, slope, positions[None, :] - queries[:, None], SOFTCAP, ALIBI)
    if MASKED:
        seen = positions[None, :] <= last_seen[:, None]
        if WINDOW > 0:
            seen &= positions[None, :] > queries[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        # Cells beyond the end may hold anything, NaN too.
        v = tl.where((positions < length)[:, None], v, 0.0)
    unit = 1.0 if SOFTCAP or ALIBI else scale * 1.4426950408889634
    new = tl.maximum(largest, tl.max(scores, 1) * unit)
    finite = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    # Times -1, which costs nothing: what negation compiles to is 0 minus it.
    weights = tl.exp2(tl.fma(scores, unit, finite[:, None] * -1))
    rescale = tl.exp2(largest - finite)
    weight = tl.fma(weight, rescale, tl.sum(weights, 1))
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return new, weight, acc
