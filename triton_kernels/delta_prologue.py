"""From what a gated delta layer's first product makes of each token to its heads, convolved and normed, and its gates.

A token's row: q, k and v (`delta_heads.py`), the numbers that gate the heads' outputs, then b and a of each value head.
The first part goes through a depthwise convolution over the tokens of its sequence. The inputs that a sequence's next
tokens will want, its tails, are kept by slot; a token at position 0 has none before it, whatever lies there.

Shape suffixes: T tokens, or of a slot's tails W - 1, the oldest first; N numbers of a row; C channels of the
convolution, or chunks in what tells of those; W taps, the last of them the token's own; S slots; B decode rows; K key
heads of D numbers, H value heads of V.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_indices
from tercet.triton_kernels.delta_heads import DeltaHeads, check_chunks, check_inputs, check_rows
from tercet.triton_kernels.delta_tails import keep_chunk_tails
from tercet.triton_kernels.dispatch import INTERPRETED, use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_FEW_TOKENS, _MANY_TOKENS = 64, 1024
_WALK = 8, 8, 4
"""Rows of a program, tokens of each, warps."""
_FAST = True
_SIZES = ["T", "B", "S", "num_chunks"]


@triton.jit
def _nothing():
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
def _store_gates(
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
    # softplus: max(a, 0) + log(1 + e), where what is lost in 1 + e is made good.
    e = tl.exp(-tl.abs(a))
    more = 1.0 + e
    grown = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=heads < H, other=0.0))
    gates_ptrs = gates_ptr + rows * (2 * H) + heads
    tl.store(gates_ptrs, -rate * (tl.maximum(a, 0.0) + grown), mask=mask)
    tl.store(gates_ptrs + H, 1.0 / (1.0 + tl.exp(-b)), mask=mask)


@triton.jit
def _taps(conv_ptr, columns, own, C: tl.constexpr, W: tl.constexpr):
    """Of some columns, the oldest token's first."""
    taps = _nothing()
    for tap in tl.static_range(W):
        taps += (tl.load(conv_ptr + columns * W + tap, mask=own & (columns < C), other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _silu(y, FAST: tl.constexpr):
    """FAST: without the care for sigmoids that are no longer normal numbers, which come out as zeros."""
    if FAST:
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
def _convolved(inputs, taps, scale, NORM: tl.constexpr, FAST: tl.constexpr, W: tl.constexpr):
    """SiLU of what taps make of inputs, as many and in their order; heads of length `scale` if NORM says so."""
    y = inputs[0].to(tl.float32) * taps[0][None, :]
    for tap in tl.static_range(1, W):
        y += inputs[tap].to(tl.float32) * taps[tap][None, :]
    y = _silu(y, FAST)
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None] * scale
    return y


@triton.jit
def _some_tokens(
    x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, qkv_ptr,
    first, columns, own, taps, head, T, B, S, num_chunks,
    K: tl.constexpr, C: tl.constexpr, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Tokens of any kind: each looks up where it stands."""
    tokens = first + tl.arange(0, BLOCK_T)
    real = tokens < T
    slot, ahead, before = _places(
        tokens, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, B, num_chunks, BLOCK_C
    )  # fmt: skip
    kept = real & (slot >= 0) & (slot < S)
    mask = real[:, None] & own[None, :]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * N + columns[None, :]
    tails_ptrs = tails_ptr + slot.to(tl.int64)[:, None] * ((W - 1) * C) + columns[None, :]
    inputs = _nothing()
    for tap in tl.static_range(W):
        back = W - 1 - tap
        x = tl.load(x_ptrs - back * N, mask=mask & (ahead >= back)[:, None], other=0.0)
        if back:
            is_tail = kept & (ahead < back) & (before > 0)
            tail_ptrs = tails_ptrs + (tap + ahead)[:, None] * C
            tail = tl.load(tail_ptrs, mask=is_tail[:, None] & own[None, :], other=0.0)
            x = tl.where(is_tail[:, None], tail, x)
        inputs += (x,)
    if first < B:
        tl.debug_barrier()  # other threads may yet read what these write
        moves = (kept & (tokens < B) & (before >= 0))[:, None] & own[None, :]
        for tap in tl.static_range(1, W):
            tl.store(tails_ptrs + (tap - 1) * C, inputs[tap], mask=moves)
    qkv_ptrs = qkv_ptr + tokens.to(tl.int64)[:, None] * C + columns[None, :]
    if head < 2 * K:
        y = _convolved(inputs, taps, tl.where(head < K, D**-0.5, 1.0), True, FAST, W)
        tl.store(qkv_ptrs, y.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        y = _convolved(inputs, taps, 1.0, False, FAST, W)
        tl.store(qkv_ptrs, y.to(qkv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _delta_prologue_kernel(
    x_ptr, rates_ptr, tails_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr,
    chunk_starts_ptr, query_starts_ptr, rows_ptr, qkv_ptr, gates_ptr, T, B, S, num_chunks,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_ROWS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_T, 2 K + H + 1): one program owns a head of some tokens, with its tails of decode rows; the last
    ones own the gates of all heads.

    Tails of chunks are another kernel's: tokens of several programs read them.
    """
    C: tl.constexpr = 2 * K * D + H * V
    head = tl.program_id(1)
    is_value = head >= 2 * K
    numbers = tl.arange(0, BLOCK)
    columns = tl.where(is_value, 2 * K * D + (head - 2 * K) * V, head * D) + numbers
    own = numbers < tl.where(is_value, V, D)
    taps = _taps(conv_ptr, columns, own, C, W)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    first = tl.program_id(0) * BLOCK_T
    if head == 2 * K + H:
        tokens = first + tl.arange(0, BLOCK_T)
        _store_gates(rates_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, tokens < T, ROW, H, BLOCK_H)
    else:
        _some_tokens(
            x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, qkv_ptr,
            first, columns, own, taps, head, T, B, S, num_chunks, K, C, D, N, W, BLOCK_T, BLOCK_C, FAST,
        )  # fmt: skip


@triton.jit
def _walk(
    x_ptrs, qkv_ptrs, mask, inputs, taps, scale,
    NORM: tl.constexpr, FAST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, W: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Of some rows LENGTH tokens each, whose inputs are loaded at once and turn into those before the next token."""
    loaded = _nothing()
    for step in tl.static_range(LENGTH):
        loaded += (tl.load(x_ptrs + step * N, mask=mask, other=0.0),)
    for step in tl.static_range(LENGTH):
        inputs += (loaded[step].to(tl.float32),)
        y = _convolved(inputs, taps, scale, NORM, FAST, W)
        tl.store(qkv_ptrs + step * C, y.to(qkv_ptrs.dtype.element_ty), mask=mask)
        inputs = inputs[1:]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _delta_walk_kernel(
    x_ptr, rates_ptr, tails_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr,
    chunk_starts_ptr, query_starts_ptr, rows_ptr, qkv_ptr, gates_ptr, T, B, S, num_chunks,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, BLOCK_T: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr, HAS_ROWS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (2 K + H + 1, T / (BLOCK_T LENGTH)): as `_delta_prologue_kernel`, for many tokens of few chunks.

    Where all of a program's are of one chunk, they are BLOCK_T rows of LENGTH tokens, and each input is loaded once.
    """
    C: tl.constexpr = 2 * K * D + H * V
    SPAN: tl.constexpr = BLOCK_T * LENGTH
    tl.static_assert(LENGTH >= W - 1)
    head = tl.program_id(0)
    is_value = head >= 2 * K
    numbers = tl.arange(0, BLOCK)
    columns = tl.where(is_value, 2 * K * D + (head - 2 * K) * V, head * D) + numbers
    own = numbers < tl.where(is_value, V, D)
    taps = _taps(conv_ptr, columns, own, C, W)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    first = tl.program_id(1) * SPAN
    if head == 2 * K + H:
        tokens = first + tl.arange(0, SPAN)
        _store_gates(rates_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, tokens < T, ROW, H, BLOCK_H)
    elif first < T:
        chunks = tl.arange(0, BLOCK_C)
        ends = tl.load(query_starts_ptr + 1 + chunks, mask=chunks < num_chunks, other=2147483647)
        chunk = tl.minimum(tl.sum((ends <= first - B).to(tl.int32), 0), num_chunks - 1)
        begin, end = tl.load(query_starts_ptr + chunk), tl.load(query_starts_ptr + chunk + 1)
        if (first >= B + begin) & (first + SPAN <= tl.minimum(B + end, T)):
            ahead = first - B - begin
            slot = tl.load(chunk_slots_ptr + chunk).to(tl.int64)
            started = (slot >= 0) & (slot < S) & (tl.load(chunk_starts_ptr + chunk) > 0)
            rows = tl.arange(0, BLOCK_T)
            tokens = first.to(tl.int64) + rows * LENGTH
            x_ptrs = x_ptr + tokens[:, None] * N + columns[None, :]
            qkv_ptrs = qkv_ptr + tokens[:, None] * C + columns[None, :]
            tails_ptrs = tails_ptr + slot * ((W - 1) * C) + rows[:, None] * 0 + columns[None, :]
            inputs = _nothing()
            for tap in tl.static_range(W - 1):
                back = W - 1 - tap
                behind = (rows > 0) | (ahead >= back)
                x = tl.load(x_ptrs - back * N, mask=behind[:, None] & own[None, :], other=0.0)
                is_tail = (started & (rows == 0) & (ahead < back))[:, None]
                tail = tl.load(tails_ptrs + (tap + ahead) * C, mask=is_tail & own[None, :], other=0.0)
                inputs += (tl.where(is_tail, tail, x).to(tl.float32),)
            mask = (rows[:, None] >= 0) & own[None, :]
            if is_value:
                _walk(x_ptrs, qkv_ptrs, mask, inputs, taps, 1.0, False, FAST, N, C, W, LENGTH)
            else:
                scale = tl.where(head < K, D**-0.5, 1.0)
                _walk(x_ptrs, qkv_ptrs, mask, inputs, taps, scale, True, FAST, N, C, W, LENGTH)
        else:
            for step in range(LENGTH):
                _some_tokens(
                    x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr,
                    qkv_ptr, first + step * BLOCK_T, columns, own, taps, head, T, B, S, num_chunks,
                    K, C, D, N, W, BLOCK_T, BLOCK_C, FAST,
                )  # fmt: skip


def delta_prologue(
    x_TN: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    *,
    num_key_heads: int,
    key_dim: int,
    rows: Tensor | None,
    rates_TR: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, N] -> [T, C]: convolved, SiLU, heads of q and k of length 1, q by D ** -0.5; and [T, 2 H]: log decays, then
    betas, in fp32. Updates `tails_STC` of the slots that have tokens here.

    The first B tokens are decode rows': one of length 0 changes nothing. `rows`: how many tokens there are in truth,
    int32 [1] on the device; those behind, as those of no chunk, may be left as they are. `rates_TR`: b and a, where
    rows have them not at their end but lack them. fp32 inside, rounded once. Graph-safe.
    """
    heads = check_inputs(x_TN, rates_TR, tails_STC, conv_CW, a_log_H, dt_bias_H, num_key_heads, key_dim)
    rates_TR = x_TN[:, -2 * heads.H :] if rates_TR is None else rates_TR
    check_rows(decode_slots_B, decode_lengths_B, x_TN)
    check_chunks(chunk_slots_C, chunk_starts_C, query_starts_C1, x_TN)
    if x_TN.shape[0] < decode_slots_B.shape[0]:
        raise ValueError(f"x: got {x_TN.shape[0]} tokens, wanted one for each of {decode_slots_B.shape[0]} decode rows")
    if rows is not None:
        check_indices("rows", rows, x_TN, 1)
    chunks = chunk_slots_C, chunk_starts_C, query_starts_C1
    if not use_kernels(x_TN):
        return delta_prologue_reference(
            x_TN, rates_TR, tails_STC, conv_CW, a_log_H, dt_bias_H, decode_slots_B, decode_lengths_B, *chunks,
            heads=heads,
        )  # fmt: skip
    T, (K, H, D, V), C, W = x_TN.shape[0], heads, heads.channels, conv_CW.shape[1]
    B, S, num_chunks = decode_slots_B.shape[0], tails_STC.shape[0], chunk_slots_C.shape[0]
    qkv_TC, gates_T2H = x_TN.new_empty(T, C), torch.empty(T, 2 * H, dtype=torch.float32, device=x_TN.device)
    if T:
        tensors = (
            x_TN, rates_TR, tails_STC, conv_CW, a_log_H, dt_bias_H, decode_slots_B, decode_lengths_B, *chunks,
            query_starts_C1 if rows is None else rows, qkv_TC, gates_T2H, T, B, S, num_chunks,
        )  # fmt: skip
        how = {
            "K": K, "H": H, "D": D, "V": V, "N": x_TN.shape[1], "ROW": rates_TR.stride(0), "W": W, "BLOCK": max(D, V),
            "BLOCK_H": next_power_of_2(H), "BLOCK_C": next_power_of_2(num_chunks) if num_chunks else 0,
            "HAS_ROWS": rows is not None, "FAST": _FAST and not INTERPRETED, **overlap_options(x_TN),
        }  # fmt: skip
        # A row of a tile is as many threads' in all of them: its sums are of the same order.
        if num_chunks and T - B >= _MANY_TOKENS:
            block_t, length, warps = _WALK
            _delta_walk_kernel[(2 * K + H + 1, cdiv(T, block_t * length))](
                *tensors, BLOCK_T=block_t, LENGTH=length, num_warps=warps, **how
            )
        else:
            block_t, warps = (2, 1) if T <= _FEW_TOKENS else (16, 4)
            _delta_prologue_kernel[(cdiv(T, block_t), 2 * K + H + 1)](*tensors, BLOCK_T=block_t, num_warps=warps, **how)
    keep_chunk_tails(x_TN, tails_STC, *chunks, B)
    return qkv_TC, gates_T2H


def delta_prologue_reference(
    x_TN: Tensor,
    rates_TR: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    *,
    heads: DeltaHeads,
) -> tuple[Tensor, Tensor]:
    """The same, sequence by sequence. Tokens of no chunk come out as zeros.

    Functions that PyTorch rounds otherwise at the end of a tensor than within it are computed in fp64.
    """
    T, C, B = x_TN.shape[0], heads.channels, len(decode_slots_B)
    qkv_TC = x_TN.new_zeros(T, C)
    gates_T2H = torch.zeros(T, 2 * heads.H, dtype=torch.float32, device=x_TN.device)
    sequences = [
        (slot, length - 1, row, min(length, 1))
        for row, (slot, length) in enumerate(zip(decode_slots_B.tolist(), decode_lengths_B.tolist(), strict=True))
    ]
    begins = query_starts_C1.tolist()
    sequences += [
        (slot, start, B + begin, end - begin)
        for slot, start, begin, end in zip(
            chunk_slots_C.tolist(), chunk_starts_C.tolist(), begins, begins[1:], strict=False
        )
    ]
    for slot, start, first, count in sequences:
        if count <= 0:
            continue
        kept = 0 <= slot < tails_STC.shape[0]
        inputs = x_TN[first : first + count, :C]
        before = tails_STC[slot] if kept and start > 0 else torch.zeros_like(tails_STC[0])
        inputs = torch.cat((before, inputs))
        if kept:
            tails_STC[slot] = inputs[count:]
        qkv_TC[first : first + count] = _heads_reference(inputs.float(), conv_CW.float(), heads).to(x_TN.dtype)
        b, a = rates_TR[first : first + count].double().chunk(2, 1)
        log_decays = -a_log_H.double().exp() * F.softplus(a + dt_bias_H.double())
        gates_T2H[first : first + count] = torch.cat((log_decays, b.sigmoid()), 1).float()
    return qkv_TC, gates_T2H


def _heads_reference(inputs_TC: Tensor, conv_CW: Tensor, heads: DeltaHeads) -> Tensor:
    """Of W - 1 tokens fewer than come in."""
    W = conv_CW.shape[1]
    count = len(inputs_TC) - W + 1
    x_TC = inputs_TC[:count] * conv_CW[:, 0]
    for tap in range(1, W):
        x_TC += inputs_TC[tap : tap + count] * conv_CW[:, tap]
    x_TC = F.silu(x_TC.double()).float()
    q, k, v = x_TC.split((heads.K * heads.D, heads.K * heads.D, heads.H * heads.V), 1)
    return torch.cat((_unit(q.contiguous(), heads.D) * heads.D**-0.5, _unit(k.contiguous(), heads.D), v), 1)


def _unit(x_TC: Tensor, D: int) -> Tensor:
    """Heads of length 1."""
    x_TKD = x_TC.view(x_TC.shape[0], -1, D)
    return x_TKD.mul((x_TKD.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).flatten(1)
