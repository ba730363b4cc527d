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
from torch import Tensor

from tercet.triton_kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_indices,
    check_same,
    check_shape,
)
from tercet.triton_kernels.delta_heads import DeltaHeads, check_chunks, check_heads, check_rows


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
) -> tuple[Tensor, Tensor]:
    """[T, N] -> [T, C]: convolved, SiLU, heads of q and k of length 1, q by D ** -0.5; and [T, 2 H]: log decays, then
    betas, in fp32. Updates `tails_STC` of the slots that have tokens here.

    The first B tokens are decode rows': one of length 0 changes nothing. `rows`: how many tokens there are in truth,
    int32 [1] on the device; those behind, as those of no chunk, may be left as they are. fp32 inside, rounded once.
    Graph-safe.
    """
    heads = _check(x_TN, tails_STC, conv_CW, a_log_H, dt_bias_H, num_key_heads, key_dim)
    check_rows(decode_slots_B, decode_lengths_B, x_TN)
    check_chunks(chunk_slots_C, chunk_starts_C, query_starts_C1, x_TN)
    if x_TN.shape[0] < decode_slots_B.shape[0]:
        raise ValueError(f"x: got {x_TN.shape[0]} tokens, wanted one for each of {decode_slots_B.shape[0]} decode rows")
    if rows is not None:
        check_indices("rows", rows, x_TN, 1)
    return delta_prologue_reference(
        x_TN, tails_STC, conv_CW, a_log_H, dt_bias_H, decode_slots_B, decode_lengths_B, chunk_slots_C,
        chunk_starts_C, query_starts_C1, heads=heads,
    )  # fmt: skip


def delta_prologue_reference(
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
        b, a = x_TN[first : first + count, C + heads.H * heads.V :].double().chunk(2, 1)
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


def _check(
    x_TN: Tensor, tails_STC: Tensor, conv_CW: Tensor, a_log_H: Tensor, dt_bias_H: Tensor, num_key_heads: int,
    key_dim: int,
) -> DeltaHeads:  # fmt: skip
    check_dtype("x", x_TN, *FLOATS)
    check_shape("x", x_TN, None, None)
    check_contiguous("x", x_TN)
    check_shape("conv", conv_CW, None, None)
    check_same("conv", conv_CW, x_TN, torch.float32)
    check_shape("a_log", a_log_H, None)
    channels, W = conv_CW.shape
    H = a_log_H.shape[0]
    if not 2 <= W <= 8:
        raise ValueError(f"conv: got {W} taps, wanted 2 to 8")
    values = channels - 2 * num_key_heads * key_dim
    if H < 1 or values <= 0 or values % H:
        raise ValueError(
            f"conv: got {channels} channels, wanted twice {num_key_heads} key heads of {key_dim} and {H} value heads"
        )
    heads = check_heads(num_key_heads, H, key_dim, values // H)
    check_shape("x", x_TN, None, channels + values + 2 * H)
    check_shape("tails", tails_STC, None, W - 1, channels)
    check_same("tails", tails_STC, x_TN)
    for name, numbers in (("a_log", a_log_H), ("dt_bias", dt_bias_H)):
        check_shape(name, numbers, H)
        check_dtype(name, numbers, torch.float32)
        check_contiguous(name, numbers)
        check_device(name, numbers, x_TN)
    return heads
