"""What the sums of attention begin with where q heads have sinks.

A sink is a number that a q head has learnt: the softmax of each of its queries counts it as one more score, as it is,
whose value is zeros. Of a row whose keys are cut one part alone counts it, and whoever merges parts knows of none; but
for few rows parts are merged onto the newest token, and it is counted there (`decode_few.py`, `decode_tried.py`).
"""

import triton
import triton.language as tl


@triton.jit
def load_sinks(sinks_ptr, heads, counted):
    """The score that each is, in units of log 2: that of nothing where it is not `counted`."""
    return tl.load(sinks_ptr + heads, mask=counted, other=float("-inf")).to(tl.float32) * 1.4426950408889634


@triton.jit
def begin_with_sinks(sinks_ptr, heads, counted):
    """The largest score, in units of log 2, and the weight: those of nothing where the sink is not `counted`."""
    largest = load_sinks(sinks_ptr, heads, counted)
    return largest, tl.where(largest > float("-inf"), 1.0, 0.0)
