"""The gates of experts, at the end of the product of gate and up: of those that keep them within limits, and of others.

Shape suffixes: M rows, N gate and up columns in turns, E experts, F intermediate size; 2F gate and up columns in turns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.gelu_and_mul import gelu
from tercet.triton_kernels.matmul_epilogue import CLAMPED, GELU, gated


class ClampedGate(NamedTuple):
    """What experts end their first product with: (min(max(up, -limit), limit) + 1) * gate * sigmoid(slope * gate), gate
    at most `limit`."""

    bias_E2F: Tensor
    """What is added first, by each expert."""
    limit: float
    slope: float


@triton.jit
def clamped(gate, up, limit, slope):
    """In fp32."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-slope * gate)))


@triton.jit
def gated_by(gate, up, limit, slope, EPILOGUE: tl.constexpr):
    """In fp32, by SiLU's gates, GELU's or CLAMPED ones."""
    if EPILOGUE == CLAMPED:
        y = clamped(gate, up, limit, slope)
    elif EPILOGUE == GELU:
        y = gelu(gate) * up
    else:
        y = gated(gate, up)
    return y


@triton.jit
def gate_columns(
    acc_MN, limit, slope, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr
):  # fmt: skip
    """The same of columns in turns: [BLOCK_M, BLOCK_N] -> [BLOCK_M, BLOCK_N / 2]."""
    gate, up = tl.split(tl.reshape(acc_MN, (BLOCK_M, BLOCK_N // 2, 2)))
    return gated_by(gate, up, limit, slope, EPILOGUE)


@triton.jit
def load_own(bias_ptr, expert, columns, N: tl.constexpr):
    """What an expert adds to its columns of the N."""
    return tl.load(bias_ptr + expert.to(tl.int64) * N + columns, mask=columns < N, other=0.0)


def clamped_gate_reference(y_M2F: Tensor, bias_2F: Tensor, limit: float, slope: float) -> Tensor:
    """The same in PyTorch, of rows of one expert."""
    both_M2F = y_M2F.float() + bias_2F.float()
    gate_MF, up_MF = both_M2F[:, 0::2].clamp(max=limit), both_M2F[:, 1::2].clamp(-limit, limit)
    return ((up_MF + 1) * gate_MF * torch.sigmoid(slope * gate_MF)).to(y_M2F.dtype)
