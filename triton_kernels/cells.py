"""What a cache in FP8 is multiplied in: fp16, which has all its numbers, and more digits than bf16.

For kernels in plain Triton; `decode_cells.py` has the like in Gluon.
"""

import triton
import triton.language as tl


@triton.jit
def as_factor(q, dtype: tl.constexpr, cell: tl.constexpr):
    """Queries of a model in `dtype`, rounded to what keys of type `cell` are multiplied in, and never infinite."""
    if cell == tl.float8e4nv and dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    else:
        q = q.to(dtype)
    return q
