"""`mamba_prologue` of tokens that are tried: tails stay as they are, and what comes of tokens is left for later.

Which of them hold is known at the step's end. Then states move on by what this leaves (`delta_settle.py`).

Shape suffixes as there.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.delta_prologue import tile_of
from tercet.triton_kernels.delta_tokens import find_tried_inputs
from tercet.triton_kernels.delta_tried_prologue import check_left, prepare_slots
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.mamba_prologue import CHANNELS, check_mamba_inputs, mamba_prologue_reference
from tercet.triton_kernels.mamba_tokens import load_channels, store_channels, store_steps
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.tried_tokens import TriedTokens, check_tried


@triton.jit(do_not_specialize=["T", "S"], do_not_specialize_on_alignment=["T", "S"])
def _mamba_tried_prologue_kernel(
    x_ptr, tails_ptr, conv_ptr, bias_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, lengths_ptr, inputs_ptr, qkv_ptr,
    gates_ptr, least, most, T, S,
    C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr, EACH: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_T, C / BLOCK + 1): one program owns some channels of some tokens; the last ones own the gates of
    all heads."""
    block = tl.program_id(1)
    columns, own, taps, bias = load_channels(conv_ptr, bias_ptr, block, C, W, BLOCK)
    let_next_start(PDL)
    wait_for_previous(PDL)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = tokens < T
    if block == (C + BLOCK - 1) // BLOCK:
        store_steps(x_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, real, least, most, H, N, BLOCK_H)
    else:
        inputs = find_tried_inputs(
            x_ptr, tails_ptr, slots_ptr, lengths_ptr, inputs_ptr, tokens, real, columns, own, S, C, N, W, EACH
        )  # fmt: skip
        store_channels(qkv_ptr, inputs, taps, bias, tokens, real, columns, own, C, W)


def mamba_tried_prologue(
    x_TN: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    conv_bias_C: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    tried: TriedTokens,
    *,
    time_steps: tuple[float, float],
    inputs_TC: Tensor,
    qkv_TC: Tensor,
    gates_T2H: Tensor,
) -> None:
    """Write what `mamba_prologue` makes of each token behind those of its slot that are ahead of it, `qkv_TC` and
    `gates_T2H`, and what the convolution took of it, `inputs_TC`. Tails stay as they are.

    Rows of tokens that are not tried are anything. fp32 inside, rounded once. Graph-safe.
    """
    check_mamba_inputs(x_TN, tails_STC, conv_CW, conv_bias_C, a_log_H, dt_bias_H)
    check_tried(tried, x_TN, x_TN.shape[0])
    (T, N), (C, W), H = x_TN.shape, conv_CW.shape, a_log_H.shape[0]
    check_left(inputs_TC, qkv_TC, gates_T2H, x_TN, C, H)
    weights = conv_CW, conv_bias_C, a_log_H, dt_bias_H
    if not use_kernels(x_TN):
        mamba_tried_prologue_reference(
            x_TN, tails_STC, *weights, tried,
            time_steps=time_steps, inputs_TC=inputs_TC, qkv_TC=qkv_TC, gates_T2H=gates_T2H,
        )  # fmt: skip
    elif T:
        block_t, warps = tile_of(T)
        _mamba_tried_prologue_kernel[(cdiv(T, block_t), cdiv(C, CHANNELS) + 1)](
            x_TN, tails_STC, *weights, tried.slots_T, tried.lengths_T, inputs_TC, qkv_TC, gates_T2H, *time_steps, T,
            tails_STC.shape[0],
            C=C, H=H, N=N, W=W, EACH=tried.each, BLOCK_T=block_t, BLOCK=CHANNELS, BLOCK_H=next_power_of_2(H),
            num_warps=warps, **overlap_options(x_TN),
        )  # fmt: skip


def mamba_tried_prologue_reference(
    x_TN: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    conv_bias_C: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    tried: TriedTokens,
    *,
    time_steps: tuple[float, float],
    inputs_TC: Tensor,
    qkv_TC: Tensor,
    gates_T2H: Tensor,
) -> None:
    """The same, by `prepare_slots`."""

    def prepare(own: slice, *step: Tensor) -> tuple[Tensor, Tensor]:
        tails_1TC, *of_rows_and_chunks = step
        weights = conv_CW, conv_bias_C, a_log_H, dt_bias_H
        return mamba_prologue_reference(x_TN[own], tails_1TC, *weights, *of_rows_and_chunks, time_steps=time_steps)

    prepare_slots(x_TN, tails_STC, tried, inputs_TC, qkv_TC, gates_T2H, prepare)
