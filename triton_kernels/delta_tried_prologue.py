"""`delta_prologue` of tokens that are tried: tails stay as they are, and what comes of tokens is left for later.

Which of them hold is known at the step's end. Then states move on by what this leaves (`delta_settle.py`).

Shape suffixes as there.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.delta_heads import DeltaHeads, check_inputs
from tercet.triton_kernels.delta_prologue import delta_prologue_reference, tile_of
from tercet.triton_kernels.delta_tokens import find_tried_inputs, load_taps, store_gates, store_head
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.tried_tokens import TriedTokens, check_tried


@triton.jit(do_not_specialize=["T", "S"], do_not_specialize_on_alignment=["T", "S"])
def _tried_prologue_kernel(
    x_ptr, rates_ptr, tails_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, lengths_ptr, inputs_ptr, qkv_ptr,
    gates_ptr, T, S,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, EACH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK_T, 2 K + H + 1): one program owns a head of some tokens; the last ones own the gates of all
    heads."""
    C: tl.constexpr = 2 * K * D + H * V
    head = tl.program_id(1)
    columns, own, taps = load_taps(conv_ptr, head, K, D, V, C, W, BLOCK)
    let_next_start(PDL)
    wait_for_previous(PDL)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = tokens < T
    if head == 2 * K + H:
        store_gates(rates_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, real, ROW, H, BLOCK_H)
    else:
        inputs = find_tried_inputs(
            x_ptr, tails_ptr, slots_ptr, lengths_ptr, inputs_ptr, tokens, real, columns, own, S, C, N, W, EACH
        )  # fmt: skip
        store_head(qkv_ptr, inputs, taps, tokens, real, columns, own, head, K, C, D, W)


def delta_tried_prologue(
    x_TN: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    tried: TriedTokens,
    *,
    num_key_heads: int,
    key_dim: int,
    inputs_TC: Tensor,
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    rates_TR: Tensor | None = None,
) -> None:
    """Write what `delta_prologue` makes of each token behind those of its slot that are ahead of it, `qkv_TC` and
    `gates_T2H`, and what the convolution took of it, `inputs_TC`. Tails stay as they are.

    Rows of tokens that are not tried are anything. `rates_TR` as there. fp32 inside, rounded once. Graph-safe.
    """
    heads = check_inputs(x_TN, rates_TR, tails_STC, conv_CW, a_log_H, dt_bias_H, num_key_heads, key_dim)
    rates_TR = x_TN[:, -2 * heads.H :] if rates_TR is None else rates_TR
    check_tried(tried, x_TN, x_TN.shape[0])
    T, (K, H, D, V), C, W = x_TN.shape[0], heads, heads.channels, conv_CW.shape[1]
    check_left(inputs_TC, qkv_TC, gates_T2H, x_TN, C, H)
    if not use_kernels(x_TN):
        delta_tried_prologue_reference(
            x_TN, rates_TR, tails_STC, conv_CW, a_log_H, dt_bias_H, tried,
            heads=heads, inputs_TC=inputs_TC, qkv_TC=qkv_TC, gates_T2H=gates_T2H,
        )  # fmt: skip
    elif T:
        block_t, warps = tile_of(T)
        _tried_prologue_kernel[(cdiv(T, block_t), 2 * K + H + 1)](
            x_TN, rates_TR, tails_STC, conv_CW, a_log_H, dt_bias_H, tried.slots_T, tried.lengths_T, inputs_TC, qkv_TC,
            gates_T2H, T, tails_STC.shape[0],
            K=K, H=H, D=D, V=V, N=x_TN.shape[1], ROW=rates_TR.stride(0), W=W, EACH=tried.each, BLOCK_T=block_t,
            BLOCK=max(D, V), BLOCK_H=next_power_of_2(H), num_warps=warps, **overlap_options(x_TN),
        )  # fmt: skip


def check_left(
    inputs_TC: Tensor, qkv_TC: Tensor, gates_T2H: Tensor, x_TN: Tensor, num_channels: int, num_heads: int
) -> None:
    """Room for what is left of tokens, or raise."""
    T = x_TN.shape[0]
    for name, tensor in (("inputs", inputs_TC), ("qkv", qkv_TC)):
        check_shape(name, tensor, T, num_channels)
        check_same(name, tensor, x_TN)
    check_shape("gates", gates_T2H, T, 2 * num_heads)
    check_dtype("gates", gates_T2H, torch.float32)
    check_contiguous("gates", gates_T2H)
    check_device("gates", gates_T2H, x_TN)


def delta_tried_prologue_reference(
    x_TN: Tensor,
    rates_TR: Tensor,
    tails_STC: Tensor,
    conv_CW: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    tried: TriedTokens,
    *,
    heads: DeltaHeads,
    inputs_TC: Tensor,
    qkv_TC: Tensor,
    gates_T2H: Tensor,
) -> None:
    """The same, by `prepare_slots`."""

    def prepare(own: slice, *step: Tensor) -> tuple[Tensor, Tensor]:
        tails_1TC, *of_rows_and_chunks = step
        weights = conv_CW, a_log_H, dt_bias_H
        return delta_prologue_reference(
            x_TN[own], rates_TR[own], tails_1TC, *weights, *of_rows_and_chunks, heads=heads
        )  # fmt: skip

    prepare_slots(x_TN, tails_STC, tried, inputs_TC, qkv_TC, gates_T2H, prepare)


def prepare_slots(
    x_TN: Tensor,
    tails_STC: Tensor,
    tried: TriedTokens,
    inputs_TC: Tensor,
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    prepare: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Slot by slot, whose tokens are a chunk, and whose tails go. `prepare`: a prologue of tokens, told which; from
    their tails on its arguments are those of a step's rows and chunks."""
    inputs_TC.copy_(x_TN[:, : inputs_TC.shape[1]])
    qkv_TC.zero_()
    gates_T2H.zero_()
    none = tried.slots_T[:0]
    for slot, first, count in tried.counts():
        own, start_1 = slice(first, first + count), tried.lengths_T[first : first + 1] - 1
        has_tails = 0 <= slot < len(tails_STC)
        tails_1TC = tails_STC[slot : slot + 1].clone() if has_tails else torch.zeros_like(tails_STC[:1])
        chunk = none.new_zeros(1), start_1, none.new_tensor([0, count])
        qkv_TC[own], gates_T2H[own] = prepare(own, tails_1TC, none, none, *chunk)
