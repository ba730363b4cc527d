"""From what a Mamba-2 layer's first product makes of each token to its queries, keys and values, and its gates.

A token's row: q, k and v (`delta_heads.py`; Mamba's C, B and x), the numbers that gate what comes out, then what each
head's time step is made of. The first part goes through a depthwise convolution over the tokens of its sequence, with a
bias, and SiLU. Tails are as those of `delta_prologue.py`.

Shape suffixes: T tokens, or of a slot's tails W - 1, the oldest first; N numbers of a row; C channels of the
convolution, or chunks in what tells of those; W taps, the last of them the token's own; S slots; B decode rows; H
heads.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_same, check_shape
from tercet.triton_kernels.delta_heads import check_convolution, check_tokens
from tercet.triton_kernels.delta_prologue import convolve_reference, inputs_of_sequences, tile_of
from tercet.triton_kernels.delta_tails import keep_chunk_tails
from tercet.triton_kernels.delta_tokens import find_inputs
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.mamba_tokens import load_channels, store_channels, store_steps
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

CHANNELS = 128
"""Of one program."""
_SIZES = ["T", "B", "S", "num_chunks"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _mamba_prologue_kernel(
    x_ptr, tails_ptr, conv_ptr, bias_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr,
    chunk_starts_ptr, query_starts_ptr, rows_ptr, qkv_ptr, gates_ptr, least, most, T, B, S, num_chunks,
    C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_T, C / BLOCK + 1): one program owns some channels of some tokens, with their tails of decode
    rows; the last ones own the gates of all heads."""
    block = tl.program_id(1)
    columns, own, taps, bias = load_channels(conv_ptr, bias_ptr, block, C, W, BLOCK)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    first = tl.program_id(0) * BLOCK_T
    if block == (C + BLOCK - 1) // BLOCK:
        tokens = first + tl.arange(0, BLOCK_T)
        store_steps(x_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, tokens < T, least, most, H, N, BLOCK_H)
    else:
        tokens, real, inputs = find_inputs(
            x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr,
            first, columns, own, T, B, S, num_chunks, C, N, W, BLOCK_T, BLOCK_C,
        )  # fmt: skip
        store_channels(qkv_ptr, inputs, taps, bias, tokens, real, columns, own, C, W)


def mamba_prologue(
    x_TN: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    conv_bias_C: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    *,
    time_steps: tuple[float, float],
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[T, N] -> [T, C]: convolved, SiLU; and [T, 2 H]: log decays, then time steps, in fp32. Updates `tails_STC` of
    the slots that have tokens here.

    The first B tokens are decode rows': one of length 0 changes nothing. `time_steps`: the least and the most that one
    may be. `rows`: how many tokens there are in truth, int32 [1] on the device; those behind, as those of no chunk, may
    be left as they are. fp32 inside, rounded once. Graph-safe.
    """
    check_mamba_inputs(x_TN, tails_STC, conv_CW, conv_bias_C, a_log_H, dt_bias_H)
    check_tokens(x_TN, decode_slots_B, decode_lengths_B, chunk_slots_C, chunk_starts_C, query_starts_C1, rows)
    weights, chunks = (conv_CW, conv_bias_C, a_log_H, dt_bias_H), (chunk_slots_C, chunk_starts_C, query_starts_C1)
    if not use_kernels(x_TN):
        return mamba_prologue_reference(
            x_TN, tails_STC, *weights, decode_slots_B, decode_lengths_B, *chunks, time_steps=time_steps
        )
    (T, N), (C, W), H = x_TN.shape, conv_CW.shape, a_log_H.shape[0]
    B, S, num_chunks = decode_slots_B.shape[0], tails_STC.shape[0], chunk_slots_C.shape[0]
    qkv_TC, gates_T2H = x_TN.new_empty(T, C), torch.empty(T, 2 * H, dtype=torch.float32, device=x_TN.device)
    if T:
        block_t, warps = tile_of(T)
        _mamba_prologue_kernel[(cdiv(T, block_t), cdiv(C, CHANNELS) + 1)](
            x_TN, tails_STC, *weights, decode_slots_B, decode_lengths_B, *chunks,
            query_starts_C1 if rows is None else rows, qkv_TC, gates_T2H, *time_steps, T, B, S, num_chunks,
            C=C, H=H, N=N, W=W, BLOCK_T=block_t, BLOCK=CHANNELS, BLOCK_H=next_power_of_2(H),
            BLOCK_C=next_power_of_2(num_chunks) if num_chunks else 0, HAS_ROWS=rows is not None, num_warps=warps,
            **overlap_options(x_TN),
        )  # fmt: skip
    keep_chunk_tails(x_TN, tails_STC, *chunks, B)
    return qkv_TC, gates_T2H


def mamba_prologue_reference(
    x_TN: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    conv_bias_C: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    *,
    time_steps: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """The same, sequence by sequence. Tokens of no chunk come out as zeros.

    Functions that PyTorch rounds otherwise at the end of a tensor than within it are computed in fp64.
    """
    T, C, H = x_TN.shape[0], conv_CW.shape[0], a_log_H.shape[0]
    qkv_TC = x_TN.new_zeros(T, C)
    gates_T2H = torch.zeros(T, 2 * H, dtype=torch.float32, device=x_TN.device)
    step = decode_slots_B, decode_lengths_B, chunk_slots_C, chunk_starts_C, query_starts_C1
    for own, inputs in inputs_of_sequences(x_TN[:, :C], tails_STC, *step):
        y_TC = convolve_reference(inputs.float(), conv_CW.float()) + conv_bias_C.float()
        qkv_TC[own] = F.silu(y_TC.double()).to(x_TN.dtype)
        steps_TH = F.softplus(x_TN[own, -H:].double() + dt_bias_H.double()).clamp(*time_steps)
        gates_T2H[own] = torch.cat((-a_log_H.double().exp() * steps_TH, steps_TH), 1).float()
    return qkv_TC, gates_T2H


def check_mamba_inputs(
    x_TN: Tensor, tails_STC: Tensor, conv_CW: Tensor, conv_bias_C: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> None:
    """What a prologue is told of its tokens and weights, or raise."""
    C, H = check_convolution(x_TN, tails_STC, conv_CW, a_log_H, dt_bias_H)
    check_shape("conv_bias", conv_bias_C, C)
    check_same("conv_bias", conv_bias_C, x_TN, torch.float32)
    if x_TN.shape[1] < C + H:
        raise ValueError(f"x: got {x_TN.shape[1]} numbers of a token, wanted {C} channels, gates and {H} time steps")
