"""Softmax of a tile of scores in prefill attention on Hopper, in Gluon: what a query does not see, and weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _exp2(x):
    """2^x; what would be denormal is 0. Called impure, so that it stays where it is among products and waits."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def hide(s, query, start, last_seen, WINDOW: gl.constexpr):
    """Scores of tokens that come after a query become -inf, or after `last_seen`, if queries see further; and those of
    tokens that are not in the query's window."""
    layout: gl.constexpr = s.type.layout
    if last_seen is None:
        sees = query - start + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
    else:
        sees = gl.convert_layout(last_seen, gl.SliceLayout(1, layout)) - start
    columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    seen = columns[None, :] <= sees[:, None]
    if WINDOW > 0:
        before = query - start - WINDOW + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
        seen &= columns[None, :] > before[:, None]
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def weigh(s, largest, unit, HIDDEN: gl.constexpr):
    """Softmax of one more tile of scores: weights, the largest score now, and what the sums so far shrink by."""
    new = gl.maximum(largest, gl.max(s, 1) * unit)
    finite = new
    if HIDDEN:  # of a whole row, maybe
        finite = gl.where(new == float("-inf"), 0.0, new)
    weights = _exp2(s * unit - finite[:, None])
    return weights, new, _exp2(largest - finite)
