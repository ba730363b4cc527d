"""What kernels of `mamba_prologue` make of tokens: their channels, convolved, and their gates.

Where tokens stand, and what the convolution takes of them, is as for gated delta layers (`delta_tokens.py`). Shape
suffixes as in `mamba_prologue.py`. Knows no grid.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.delta_tokens import nothing, silu, softplus, sum_taps


@triton.jit
def load_channels(conv_ptr, bias_ptr, block, C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """A block's columns, which of them there are, their taps, the oldest token's first, and their biases."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    own = columns < C
    taps = nothing()
    for tap in tl.static_range(W):
        taps += (tl.load(conv_ptr + columns * W + tap, mask=own, other=0.0).to(tl.float32),)
    return columns, own, taps, tl.load(bias_ptr + columns, mask=own, other=0.0).to(tl.float32)


@triton.jit
def store_channels(
    xbc_ptr, inputs, taps, bias, tokens, real, columns, own, C: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Of tokens, from their inputs."""
    y = silu(sum_taps(inputs, taps, W) + bias[None, :])
    ptrs = xbc_ptr + tokens.to(tl.int64)[:, None] * C + columns[None, :]
    tl.store(ptrs, y.to(xbc_ptr.dtype.element_ty), mask=real[:, None] & own[None, :])


@triton.jit
def store_steps(
    x_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, real, least, most,
    H: tl.constexpr, N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Log decays and time steps of tokens, whose rows end in what those are made of."""
    heads = tl.arange(0, BLOCK_H)[None, :]
    mask = real[:, None] & (heads < H)
    rows = tokens.to(tl.int64)[:, None]
    step = tl.load(x_ptr + rows * N + N - H + heads, mask=mask, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias_ptr + heads, mask=heads < H, other=0.0))
    step = tl.minimum(tl.maximum(step, least), most)
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=heads < H, other=0.0))
    gates_ptrs = gates_ptr + rows * (2 * H) + heads
    tl.store(gates_ptrs, -rate * step, mask=mask)
    tl.store(gates_ptrs + H, step, mask=mask)
