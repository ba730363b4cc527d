"""The kernels of Mamba-2 layers compile for GPUs that are not here, at the sizes of real models."""

import re

import pytest
import torch
from torch import Tensor

from covering import long
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_settle import delta_settle
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.gated_group_norm import gated_group_norm, gated_squares
from tercet.triton_kernels.mamba_prefill import mamba_prefill
from tercet.triton_kernels.mamba_prologue import mamba_prologue
from tercet.triton_kernels.mamba_tried_prologue import mamba_tried_prologue
from tercet.triton_kernels.relu_squared import relu_squared
from tercet.triton_kernels.tried_tokens import TriedTokens

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TAPS, SLOTS = 4, 9


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


@pytest.mark.parametrize("corrects", [True, False])
def test_all_fuse_the_same_products(corrects: bool) -> None:
    """A state's bits are those of plain steps: what decays is rounded, whoever reads it."""
    K, H, D, V, each = 8, 32, 128, 128, 4
    C = 2 * K * D + H * V
    skip = None if corrects else meta(H, dtype=FP32)
    state, tried = meta(SLOTS, H, D, V, dtype=FP32), TriedTokens(ints(8), ints(8), each)
    with compiling_for(90) as kernels:
        rows = meta(8, C, dtype=BF16), meta(8, 2 * H, dtype=FP32)
        out = meta(8, H, V, dtype=BF16)
        delta_decode(*rows, state, ints(8), ints(8), num_key_heads=K, out_BHV=out, skip_H=skip)
        delta_tried(*rows, state, tried, num_key_heads=K, out_THV=out, skip_H=skip)
        inputs, gates = meta(1, 8, C, dtype=BF16), meta(1, 8, 2 * H, dtype=FP32)
        pools = meta(1, SLOTS, TAPS - 1, C, dtype=BF16), state[None]
        delta_settle(inputs, inputs, gates, *pools, tried, ints(5), num_key_heads=K, corrects=corrects)
    for kernel in kernels[:3]:
        ptx = kernel.asm["ptx"]
        decays = set(re.findall(r"ex2\.approx\S*\s+(%\w+),", ptx))
        fused = [set(found) for found in re.findall(r"fma\.rn\.f32\s+%\w+, (%\w+), (%\w+),", ptx)]
        assert decays, kernel.name
        assert len(fused) >= 64, kernel.name
        assert not any(decays & factors for factors in fused), kernel.name


@pytest.mark.parametrize(
    ("capability", "K", "H", "D", "V", "dtype"),
    [
        (90, 1, 48, 128, 64, BF16),
        long(90, 8, 64, 128, 64, BF16),
        long(90, 1, 128, 128, 64, FP16),
        long(90, 8, 128, 128, 80, BF16),
        long(90, 1, 24, 256, 128, BF16),
        long(90, 1, 48, 128, 64, FP32),
        long(89, 8, 64, 128, 64, BF16),
        long(80, 1, 48, 128, 64, FP32),
    ],
)
def test_layer(capability: int, K: int, H: int, D: int, V: int, dtype: torch.dtype) -> None:
    C, X, B = 2 * K * D + H * V, H * V, 64
    N = C + X + H
    weights = meta(C, TAPS, dtype=dtype), meta(C, dtype=dtype), meta(H, dtype=FP32), meta(H, dtype=FP32)
    tails, states = meta(SLOTS, TAPS - 1, C, dtype=dtype), meta(SLOTS, H, D, V, dtype=FP32)
    skip, chunks, of_heads = meta(H, dtype=FP32), (ints(3), ints(3), ints(4)), {"num_key_heads": K}
    tried, steps = TriedTokens(ints(B), ints(B), 4), {"time_steps": (0.0, 1.0)}
    x, qkv, gates, out = meta(B, N, dtype=dtype), meta(B, C, dtype=dtype), meta(B, 2 * H, dtype=FP32), (H, V)
    of_layers = meta(3, B, C, dtype=dtype), meta(3, B, C, dtype=dtype), meta(3, B, 2 * H, dtype=FP32)
    with compiling_for(capability) as kernels:
        mamba_prologue(x, tails, *weights, ints(B), ints(B), ints(0), ints(0), ints(1), rows=ints(1), **steps)
        mamba_prologue(meta(8192, N, dtype=dtype), tails, *weights, ints(B), ints(B), *chunks, rows=ints(1), **steps)
        mamba_prefill(
            meta(8192, C, dtype=dtype), meta(8192, 2 * H, dtype=FP32), skip, states, *chunks,
            out_THV=meta(8192, *out, dtype=dtype), **of_heads,
        )  # fmt: skip
        answers = meta(B, *out, dtype=dtype)
        delta_decode(qkv, gates, states, ints(B), ints(B), out_BHV=answers, skip_H=skip, **of_heads)
        mamba_tried_prologue(x, tails, *weights, tried, inputs_TC=qkv, qkv_TC=qkv, gates_T2H=gates, **steps)
        delta_tried(qkv, gates, states, tried, out_THV=answers, skip_H=skip, **of_heads)
        stacked = meta(3, SLOTS, TAPS - 1, C, dtype=dtype), meta(3, SLOTS, H, D, V, dtype=FP32)
        delta_settle(*of_layers, *stacked, tried, ints(SLOTS - 1), corrects=False, **of_heads)
        gated_group_norm(answers.flatten(1), x, C, meta(X, dtype=FP32), K, 1e-5, rows=ints(1))
        squares = gated_squares(answers.flatten(1), x, C, rows=ints(1))
        gated_group_norm(
            answers.flatten(1), x, C, meta(X, dtype=FP32), 1, 1e-5, rows=ints(1), squares_PT1=squares.expand(2, B, 1)
            .contiguous(),
        )  # fmt: skip
        relu_squared(meta(B, 1856, dtype=dtype))
    names = ["_mamba_prologue_kernel", "_mamba_prologue_kernel", "_chunk_tails_kernel", "carry_tiles_kernel"]
    names += ["answer_mamba_tiles_kernel", "_delta_decode_kernel", "_mamba_tried_prologue_kernel"]
    names += ["_delta_tried_kernel", "_settle_states_kernel", "_settle_tails_kernel", "_gated_group_norm_kernel"]
    names += ["_gated_squares_kernel", "_gated_group_norm_kernel", "_relu_squared_kernel"]
    assert [kernel.name for kernel in kernels] == names
    if capability == 90:
        assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels)
        if dtype != FP32 and V % 64 == 0:
            assert all("wgmma" in kernel.asm["ptx"] for kernel in kernels[3:5])
            assert "ttg.async_copy_global_to_local" in kernels[3].asm["ttgir"]
