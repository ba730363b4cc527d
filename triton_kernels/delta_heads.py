"""What the kernels of layers that carry states ask of their tensors: heads, and the rows and chunks of a step.

A layer's channels lie as q (K heads of D), k (K heads of D), v (H heads of V): H / K value heads share a key head.

Shape suffixes: B decode rows, C chunks, C1 = C + 1, T tokens, 2H gates: log decays, then betas, or
time steps.
"""

from typing import NamedTuple

import torch
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
from tercet.triton_kernels.dispatch import INTERPRETED, use_kernels


class DeltaHeads(NamedTuple):
    """How many heads, and of how many numbers."""

    K: int
    H: int
    D: int
    V: int

    @property
    def channels(self) -> int:
        return 2 * self.K * self.D + self.H * self.V


GPU_DIM = 128
"""Numbers of a head on a GPU: of all models there are. With fewer Triton 3.7 makes products that read beyond their
shared memory."""


GPU_SIZES = (128, 256), (64, 80, 128)
"""Of keys and of values there, by Mamba-2's rule."""


def check_heads(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, like: Tensor) -> DeltaHeads:
    """Of the gated delta rule."""
    _check_counts(num_key_heads, num_value_heads)
    for name, size in (("keys", key_dim), ("values", value_dim)):
        if not 16 <= size <= 128 or size & (size - 1):
            raise ValueError(f"heads of {name}: got {size} numbers, wanted a power of two, 16 to 128")
        if size != GPU_DIM and use_kernels(like) and not INTERPRETED:
            raise ValueError(f"heads of {name}: got {size} numbers, wanted {GPU_DIM} on a GPU")
    return DeltaHeads(num_key_heads, num_value_heads, key_dim, value_dim)


def check_mamba_heads(
    num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, like: Tensor
) -> DeltaHeads:
    """Of Mamba-2's rule."""
    _check_counts(num_key_heads, num_value_heads)
    if not 16 <= key_dim <= 256 or key_dim & (key_dim - 1):
        raise ValueError(f"heads of keys: got {key_dim} numbers, wanted a power of two, 16 to 256")
    if not 16 <= value_dim <= 256 or value_dim % 16:
        raise ValueError(f"heads of values: got {value_dim} numbers, wanted a multiple of 16, 16 to 256")
    if use_kernels(like) and not INTERPRETED:
        for name, size, known in zip(("keys", "values"), (key_dim, value_dim), GPU_SIZES, strict=True):
            if size not in known:
                raise ValueError(f"heads of {name}: got {size} numbers, wanted one of {known} on a GPU")
    return DeltaHeads(num_key_heads, num_value_heads, key_dim, value_dim)


def _check_counts(num_key_heads: int, num_value_heads: int) -> None:
    if num_key_heads < 1 or num_value_heads < 1 or num_value_heads % num_key_heads:
        raise ValueError(
            f"heads: got {num_value_heads} of values and {num_key_heads} of keys, wanted a multiple of those of keys"
        )


def check_states(
    qkv_TC: Tensor, gates_T2H: Tensor, states_SHDV: Tensor, num_key_heads: int, *, corrects: bool = True
) -> DeltaHeads:
    """Tokens as the prologue leaves them, and the states, or raise. `corrects`: else by Mamba-2's rule."""
    check_shape("states", states_SHDV, None, None, None, None)
    check_dtype("states", states_SHDV, *FLOATS)
    check_contiguous("states", states_SHDV)
    _, H, D, V = states_SHDV.shape
    heads = (check_heads if corrects else check_mamba_heads)(num_key_heads, H, D, V, qkv_TC)
    check_dtype("qkv", qkv_TC, *FLOATS)
    check_shape("qkv", qkv_TC, None, heads.channels)
    check_contiguous("qkv", qkv_TC)
    check_device("qkv", qkv_TC, states_SHDV)
    check_shape("gates", gates_T2H, qkv_TC.shape[0], 2 * H)
    check_dtype("gates", gates_T2H, torch.float32)
    check_contiguous("gates", gates_T2H)
    check_device("gates", gates_T2H, states_SHDV)
    return heads


def check_out(out_THV: Tensor, qkv_TC: Tensor, heads: DeltaHeads) -> None:
    check_shape("out", out_THV, qkv_TC.shape[0], heads.H, heads.V)
    check_same("out", out_THV, qkv_TC)


def check_rows(slots_B: Tensor, lengths_B: Tensor, like: Tensor, num_rows: int | None = None) -> None:
    """Decode rows: whose they are, and how many tokens those have, this one among them."""
    check_indices("decode_slots", slots_B, like, num_rows)
    check_indices("decode_lengths", lengths_B, like, slots_B.shape[0])


def check_chunks(slots_C: Tensor, starts_C: Tensor, query_starts_C1: Tensor, like: Tensor) -> None:
    """Chunks: whose they are, the positions that they begin at, and where among the tokens they lie."""
    check_indices("chunk_slots", slots_C, like, None)
    check_indices("chunk_starts", starts_C, like, slots_C.shape[0])
    check_indices("query_starts", query_starts_C1, like, slots_C.shape[0] + 1)


def check_inputs(
    x_TN: Tensor, rates_TR: Tensor | None, tails_STC: Tensor, conv_CW: Tensor, a_log_H: Tensor, dt_bias_H: Tensor,
    num_key_heads: int, key_dim: int,
) -> DeltaHeads:  # fmt: skip
    """What a prologue is told of its tokens and weights, or raise. Without `rates_TR` rows end in rates."""
    channels, H = check_convolution(x_TN, tails_STC, conv_CW, a_log_H, dt_bias_H)
    values = channels - 2 * num_key_heads * key_dim
    if H < 1 or values <= 0 or values % H:
        raise ValueError(
            f"conv: got {channels} channels, wanted twice {num_key_heads} key heads of {key_dim} and {H} value heads"
        )
    heads = check_heads(num_key_heads, H, key_dim, values // H, x_TN)
    check_shape("x", x_TN, None, channels + values + (2 * H if rates_TR is None else 0))
    if rates_TR is not None:
        check_shape("rates", rates_TR, len(x_TN), 2 * H)
        check_same("rates", rates_TR, x_TN)
    return heads


def check_convolution(
    x_TN: Tensor, tails_STC: Tensor, conv_CW: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[int, int]:
    """What every prologue is told, or raise. Channels and heads."""
    check_dtype("x", x_TN, *FLOATS)
    check_shape("x", x_TN, None, None)
    check_contiguous("x", x_TN)
    check_shape("conv", conv_CW, None, None)
    check_same("conv", conv_CW, x_TN, torch.float32)
    check_shape("a_log", a_log_H, None)
    (channels, W), H = conv_CW.shape, a_log_H.shape[0]
    if not 2 <= W <= 8:
        raise ValueError(f"conv: got {W} taps, wanted 2 to 8")
    check_shape("tails", tails_STC, None, W - 1, channels)
    check_same("tails", tails_STC, x_TN)
    for name, numbers in (("a_log", a_log_H), ("dt_bias", dt_bias_H)):
        check_of_heads(name, numbers, H, x_TN)
    return channels, H


def check_tokens(
    x_TN: Tensor, decode_slots_B: Tensor, decode_lengths_B: Tensor, chunk_slots_C: Tensor, chunk_starts_C: Tensor,
    query_starts_C1: Tensor, rows: Tensor | None,
) -> None:  # fmt: skip
    """Whose a step's tokens are, or raise: first decode rows', then chunks'; `rows`: how many there are in truth."""
    check_rows(decode_slots_B, decode_lengths_B, x_TN)
    check_chunks(chunk_slots_C, chunk_starts_C, query_starts_C1, x_TN)
    if x_TN.shape[0] < decode_slots_B.shape[0]:
        raise ValueError(f"x: got {x_TN.shape[0]} tokens, wanted one for each of {decode_slots_B.shape[0]} decode rows")
    if rows is not None:
        check_indices("rows", rows, x_TN, 1)


def check_of_heads(name: str, numbers_H: Tensor, num_heads: int, like: Tensor) -> None:
    """A number of each head, in fp32, or raise."""
    check_shape(name, numbers_H, num_heads)
    check_dtype(name, numbers_H, torch.float32)
    check_contiguous(name, numbers_H)
    check_device(name, numbers_H, like)
