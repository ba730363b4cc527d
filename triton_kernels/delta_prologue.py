"""From what a gated delta layer's first product makes of each token to its heads, convolved and normed, and its gates.

A token's row: q, k and v (`delta_heads.py`), the numbers that gate the heads' outputs, then b and a of each value head.
The first part goes through a depthwise convolution over the tokens of its sequence. The inputs that a sequence's next
tokens will want, its tails, are kept by slot; a token at position 0 has none before it, whatever lies there.

Shape suffixes: T tokens, or of a slot's tails W - 1, the oldest first; N numbers of a row; C channels of the
convolution, or chunks in what tells of those; W taps, the last of them the token's own; S slots; B decode rows; K key
heads of D numbers, H value heads of V.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.delta_heads import DeltaHeads, check_inputs, check_tokens
from tercet.triton_kernels.delta_tails import keep_chunk_tails
from tercet.triton_kernels.delta_tokens import follow_tokens, load_taps, store_gates
from tercet.triton_kernels.delta_walk import delta_walk_kernel
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_FEW_TOKENS, _MANY_TOKENS = 64, 1024
"""Up to how many tiles are small, and from how many of chunks on programs walk over theirs."""
_WALK = 4, 8, 2
"""Rows of a program, tokens of each, warps."""
_SIZES = ["T", "B", "S", "num_chunks"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _delta_prologue_kernel(
    x_ptr, rates_ptr, tails_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr,
    chunk_starts_ptr, query_starts_ptr, rows_ptr, qkv_ptr, gates_ptr, T, B, S, num_chunks,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_T, 2 K + H + 1): one program owns a head of some tokens, with its tails of decode rows; the last
    ones own the gates of all heads.

    Tails of chunks are another kernel's: tokens of several programs read them.
    """
    C: tl.constexpr = 2 * K * D + H * V
    head = tl.program_id(1)
    columns, own, taps = load_taps(conv_ptr, head, K, D, V, C, W, BLOCK)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    first = tl.program_id(0) * BLOCK_T
    if head == 2 * K + H:
        tokens = first + tl.arange(0, BLOCK_T)
        store_gates(rates_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, tokens < T, ROW, H, BLOCK_H)
    else:
        follow_tokens(
            x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, qkv_ptr,
            first, columns, own, taps, head, T, B, S, num_chunks, K, C, D, N, W, BLOCK_T, BLOCK_C,
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
    check_tokens(x_TN, decode_slots_B, decode_lengths_B, chunk_slots_C, chunk_starts_C, query_starts_C1, rows)
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
            "HAS_ROWS": rows is not None, **overlap_options(x_TN),
        }  # fmt: skip
        # A row of a tile is as many threads' in all of them: its sums are of the same order.
        if num_chunks and T - B >= _MANY_TOKENS:
            block_t, length, warps = _WALK
            delta_walk_kernel[(2 * K + H + 1, cdiv(T, block_t * length))](
                *tensors, BLOCK_T=block_t, LENGTH=length, num_warps=warps, **how
            )
        else:
            block_t, warps = tile_of(T)
            _delta_prologue_kernel[(cdiv(T, block_t), 2 * K + H + 1)](*tensors, BLOCK_T=block_t, num_warps=warps, **how)
    keep_chunk_tails(x_TN, tails_STC, *chunks, B)
    return qkv_TC, gates_T2H


def tile_of(num_tokens: int) -> tuple[int, int]:
    """Tokens of a program that has no longer walk, and its warps."""
    return (2, 1) if num_tokens <= _FEW_TOKENS else (16, 4)


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
    T, C = x_TN.shape[0], heads.channels
    qkv_TC = x_TN.new_zeros(T, C)
    gates_T2H = torch.zeros(T, 2 * heads.H, dtype=torch.float32, device=x_TN.device)
    step = decode_slots_B, decode_lengths_B, chunk_slots_C, chunk_starts_C, query_starts_C1
    for own, inputs in inputs_of_sequences(x_TN[:, :C], tails_STC, *step):
        qkv_TC[own] = _heads_reference(inputs.float(), conv_CW.float(), heads).to(x_TN.dtype)
        b, a = rates_TR[own].double().chunk(2, 1)
        log_decays = -a_log_H.double().exp() * F.softplus(a + dt_bias_H.double())
        gates_T2H[own] = torch.cat((log_decays, b.sigmoid()), 1).float()
    return qkv_TC, gates_T2H


def inputs_of_sequences(
    x_TC: Tensor,
    tails_STC: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Of decode rows and chunks that are not empty: their tokens, and what the convolution takes of those and of the
    ones before them. Tails move on."""
    B = len(decode_slots_B)
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
        own = slice(first, first + count)
        before = tails_STC[slot] if kept and start > 0 else torch.zeros_like(tails_STC[0])
        inputs = torch.cat((before, x_TC[own]))
        if kept:
            tails_STC[slot] = inputs[count:]
        yield own, inputs


def convolve_reference(inputs_TC: Tensor, conv_CW: Tensor) -> Tensor:
    """Of W - 1 tokens fewer than come in."""
    W = conv_CW.shape[1]
    count = len(inputs_TC) - W + 1
    x_TC = inputs_TC[:count] * conv_CW[:, 0]
    for tap in range(1, W):
        x_TC += inputs_TC[tap : tap + count] * conv_CW[:, tap]
    return x_TC


def _heads_reference(inputs_TC: Tensor, conv_CW: Tensor, heads: DeltaHeads) -> Tensor:
    x_TC = convolve_reference(inputs_TC, conv_CW)
    x_TC = F.silu(x_TC.double()).float()
    q, k, v = x_TC.split((heads.K * heads.D, heads.K * heads.D, heads.H * heads.V), 1)
    return torch.cat((_unit(q.contiguous(), heads.D) * heads.D**-0.5, _unit(k.contiguous(), heads.D), v), 1)


def _unit(x_TC: Tensor, D: int) -> Tensor:
    """Heads of length 1."""
    x_TKD = x_TC.view(x_TC.shape[0], -1, D)
    return x_TKD.mul((x_TKD.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).flatten(1)
