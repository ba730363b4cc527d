"""What kernels of `delta_prologue` make of tokens: where each stands, its gates, its inputs and what comes of those.

Shape suffixes as there. Knows no grid.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.dispatch import INTERPRETED

_ON_GPU = tl.constexpr(not INTERPRETED)


@triton.jit
def nothing():
    return ()


@triton.jit
def _places(
    tokens, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, B, num_chunks,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Of tokens: their slots, how many of their sequence lie ahead of them in this step, and how many before it."""
    is_row = tokens < B
    slot = tl.load(slots_ptr + tokens, mask=is_row, other=-1)
    before = tl.load(lengths_ptr + tokens, mask=is_row, other=0) - 1
    ahead = tokens * 0
    if BLOCK_C:
        chunks = tl.arange(0, BLOCK_C)
        ends = tl.load(query_starts_ptr + 1 + chunks, mask=chunks < num_chunks, other=2147483647)
        # The number of chunks that end at or before a token is the index of its own.
        own = tl.sum((ends[None, :] <= (tokens - B)[:, None]).to(tl.int32), 1)
        inside = (tokens >= B) & (own < num_chunks)
        slot = tl.where(is_row, slot, tl.load(chunk_slots_ptr + own, mask=inside, other=-1))
        before = tl.where(is_row, before, tl.load(chunk_starts_ptr + own, mask=inside, other=0))
        ahead = tl.where(inside, tokens - B - tl.load(query_starts_ptr + own, mask=inside, other=0), 0)
    return slot, ahead, before


@triton.jit
def softplus(a):
    """max(a, 0) + log(1 + e), where what is lost in 1 + e is made good."""
    e = tl.exp(-tl.abs(a))
    more = 1.0 + e
    return tl.maximum(a, 0.0) + tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))


@triton.jit
def store_gates(
    rates_ptr,
    a_log_ptr,
    dt_bias_ptr,
    gates_ptr,
    tokens,
    real,
    ROW: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Log decays and betas of tokens, whose rates lie ROW numbers apart."""
    heads = tl.arange(0, BLOCK_H)[None, :]
    mask = real[:, None] & (heads < H)
    rows = tokens.to(tl.int64)[:, None]
    b = tl.load(rates_ptr + rows * ROW + heads, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(rates_ptr + rows * ROW + H + heads, mask=mask, other=0.0).to(tl.float32)
    a += tl.load(dt_bias_ptr + heads, mask=heads < H, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=heads < H, other=0.0))
    gates_ptrs = gates_ptr + rows * (2 * H) + heads
    tl.store(gates_ptrs, -rate * softplus(a), mask=mask)
    tl.store(gates_ptrs + H, 1.0 / (1.0 + tl.exp(-b)), mask=mask)


@triton.jit
def load_taps(
    conv_ptr, head, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A head's columns, which of them are its own, and their taps, the oldest token's first."""
    is_value = head >= 2 * K
    numbers = tl.arange(0, BLOCK)
    columns = tl.where(is_value, 2 * K * D + (head - 2 * K) * V, head * D) + numbers
    own = numbers < tl.where(is_value, V, D)
    taps = nothing()
    for tap in tl.static_range(W):
        taps += (tl.load(conv_ptr + columns * W + tap, mask=own & (columns < C), other=0.0).to(tl.float32),)
    return columns, own, taps


@triton.jit
def silu(y):
    """On a GPU without the care for sigmoids that are no longer normal numbers, which come out as zeros."""
    if _ON_GPU:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 e, e;
            mul.f32 $0, $1, e;
            }""",
            "=f,f",
            [y],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
def sum_taps(inputs, taps, W: tl.constexpr):
    """Inputs by taps, the oldest first."""
    y = inputs[0].to(tl.float32) * taps[0][None, :]
    for tap in tl.static_range(1, W):
        y += inputs[tap].to(tl.float32) * taps[tap][None, :]
    return y


@triton.jit
def convolve(inputs, taps, scale, NORM: tl.constexpr, W: tl.constexpr):
    """SiLU of what taps make of inputs, as many and in their order; heads of length `scale` if NORM says so."""
    y = silu(sum_taps(inputs, taps, W))
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None] * scale
    return y


@triton.jit
def follow_tokens(
    x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, qkv_ptr,
    first, columns, own, taps, head, T, B, S, num_chunks,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Tokens of any kind: each looks up where it stands."""
    tokens, real, inputs = find_inputs(
        x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr,
        first, columns, own, T, B, S, num_chunks, C, N, W, BLOCK_T, BLOCK_C,
    )  # fmt: skip
    store_head(qkv_ptr, inputs, taps, tokens, real, columns, own, head, K, C, D, W)


@triton.jit
def find_tried_inputs(
    x_ptr, tails_ptr, slots_ptr, lengths_ptr, inputs_ptr, tokens, real, columns, own, S,
    C: tl.constexpr, N: tl.constexpr, W: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """What the convolution takes of tokens that are tried, as many of each slot; their own part of it is left for
    later. Tails stay."""
    ahead = tokens % EACH
    slot = tl.load(slots_ptr + tokens, mask=real, other=-1)
    begun = tl.load(lengths_ptr + tokens - ahead, mask=real, other=0) > 1
    tails_ptrs = tails_ptr + slot.to(tl.int64)[:, None] * ((W - 1) * C) + columns[None, :]
    begun &= (slot >= 0) & (slot < S)
    inputs = load_inputs(x_ptr, tails_ptrs, tokens, real, ahead, begun, columns, own, C, N, W)
    inputs_ptrs = inputs_ptr + tokens.to(tl.int64)[:, None] * C + columns[None, :]
    tl.store(inputs_ptrs, inputs[W - 1], mask=real[:, None] & own[None, :])
    return inputs


@triton.jit
def find_inputs(
    x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr,
    first, columns, own, T, B, S, num_chunks,
    C: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of any kind, which of them are real, and what the convolution takes of each; tails of decode rows
    move on."""
    tokens = first + tl.arange(0, BLOCK_T)
    real = tokens < T
    slot, ahead, before = _places(
        tokens, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, B, num_chunks, BLOCK_C
    )  # fmt: skip
    kept = real & (slot >= 0) & (slot < S)
    tails_ptrs = tails_ptr + slot.to(tl.int64)[:, None] * ((W - 1) * C) + columns[None, :]
    inputs = load_inputs(x_ptr, tails_ptrs, tokens, real, ahead, kept & (before > 0), columns, own, C, N, W)
    if first < B:
        tl.debug_barrier()  # other threads may yet read what these write
        moves = (kept & (tokens < B) & (before >= 0))[:, None] & own[None, :]
        for tap in tl.static_range(1, W):
            tl.store(tails_ptrs + (tap - 1) * C, inputs[tap], mask=moves)
    return tokens, real, inputs


@triton.jit
def load_inputs(
    x_ptr, tails_ptrs, tokens, real, ahead, begun, columns, own,
    C: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """What the convolution takes of each token and of those before it, the oldest first: of the step, of which `ahead`
    are its sequence's, and of tails, if that has `begun` before."""
    mask = real[:, None] & own[None, :]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * N + columns[None, :]
    inputs = nothing()
    for tap in tl.static_range(W):
        back = W - 1 - tap
        x = tl.load(x_ptrs - back * N, mask=mask & (ahead >= back)[:, None], other=0.0)
        if back:
            is_tail = begun & (ahead < back)
            tail_ptrs = tails_ptrs + (tap + ahead)[:, None] * C
            tail = tl.load(tail_ptrs, mask=is_tail[:, None] & own[None, :], other=0.0)
            x = tl.where(is_tail[:, None], tail, x)
        inputs += (x,)
    return inputs


@triton.jit
def store_head(
    qkv_ptr, inputs, taps, tokens, real, columns, own, head,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Of tokens, from their inputs."""
    mask = real[:, None] & own[None, :]
    qkv_ptrs = qkv_ptr + tokens.to(tl.int64)[:, None] * C + columns[None, :]
    if head < 2 * K:
        y = convolve(inputs, taps, tl.where(head < K, D**-0.5, 1.0), True, W)
        tl.store(qkv_ptrs, y.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        y = convolve(inputs, taps, 1.0, False, W)
        tl.store(qkv_ptrs, y.to(qkv_ptr.dtype.element_ty), mask=mask)
