"""The kernels of gated delta layers compile for GPUs that are not here, at the sizes of real models."""

import re

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from covering import long
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.copy_places import copy_places
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_prefill import delta_prefill
from tercet.triton_kernels.delta_prologue import delta_prologue
from tercet.triton_kernels.delta_settle import delta_settle
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.delta_tried_prologue import delta_tried_prologue
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.gated_head_norm import gated_head_norm
from tercet.triton_kernels.sigmoid_gate import gate_by_sigmoid
from tercet.triton_kernels.tried_tokens import TriedTokens

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIM, TAPS, SLOTS = 128, 4, 9
TILES = ["solve_tiles_kernel", "scan_tiles_kernel", "answer_tiles_kernel"]


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


@pytest.mark.parametrize("num_chunks", [long(1), 8])
@pytest.mark.parametrize(
    ("capability", "K", "H", "dtype"),
    [
        (90, 16, 32, BF16),
        long(90, 16, 48, BF16),
        long(90, 16, 16, FP16),
        long(90, 16, 32, FP32),
        long(80, 16, 32, BF16),
        long(80, 16, 32, FP32),
        long(89, 16, 32, BF16),
        long(89, 16, 16, FP16),
        long(89, 16, 32, FP32),
    ],
)
def test_rule(capability: int, K: int, H: int, dtype: torch.dtype, num_chunks: int) -> None:
    T, B = 8192, 64
    states, channels = meta(SLOTS, H, DIM, DIM, dtype=FP32), 2 * K * DIM + H * DIM
    chunks = ints(num_chunks), ints(num_chunks), ints(num_chunks + 1)
    with compiling_for(capability) as kernels:
        tokens = meta(T, channels, dtype=dtype), meta(T, 2 * H, dtype=FP32), states
        delta_prefill(*tokens, *chunks, num_key_heads=K, out_THV=meta(T, H, DIM, dtype=dtype))
        tokens = meta(B, channels, dtype=dtype), meta(B, 2 * H, dtype=FP32), states
        delta_decode(*tokens, ints(B), ints(B), num_key_heads=K, out_BHV=meta(B, H, DIM, dtype=dtype))
    assert [kernel.name for kernel in kernels] == [*TILES, "_delta_decode_kernel"]
    if capability == 90:
        assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels)
        if dtype != FP32:
            assert all("wgmma" in kernel.asm["ptx"] for kernel in kernels[:3])
            # From tile to tile what is multiplied stays in registers, and the next tiles' numbers are on their way.
            scan = kernels[1].asm["ttgir"]
            products = [line for line in scan.splitlines() if "ttng.warp_group_dot %" in line]
            assert len(products) == 2
            assert all("opIdx = 0" in line for line in products)
            assert "ttg.async_copy_global_to_local" in scan


@pytest.mark.parametrize("capability", [90, long(80), long(89)])
@pytest.mark.parametrize(("H", "dtype", "each"), [(32, BF16, 8), long(48, FP16, 3), long(16, FP32, 16)])
def test_tokens_that_are_tried(capability: int, H: int, dtype: torch.dtype, each: int) -> None:
    K, B, L = 16, 16, 24
    T, channels = B * each, 2 * 16 * DIM + H * DIM
    tried = TriedTokens(ints(T), ints(T), each)
    layers, states = (L, T + 4), meta(L, SLOTS, H, DIM, DIM, dtype=FP32)
    inputs, qkv, gates = (
        meta(*layers, columns, dtype=of) for columns, of in ((channels, dtype), (channels, dtype), (2 * H, FP32))
    )
    out, tails = meta(T, H, DIM, dtype=dtype), meta(L, SLOTS, TAPS - 1, channels, dtype=dtype)
    of_layer = qkv[0, :T], gates[0, :T], states[0]
    weights = meta(channels, TAPS, dtype=dtype), meta(H, dtype=FP32), meta(H, dtype=FP32)
    with compiling_for(capability) as kernels:
        delta_tried_prologue(
            meta(T, channels + H * DIM + 2 * H, dtype=dtype), tails[0], *weights, tried, num_key_heads=K, key_dim=DIM,
            inputs_TC=inputs[0, :T], qkv_TC=qkv[0, :T], gates_T2H=gates[0, :T],
        )  # fmt: skip
        delta_tried(*of_layer, tried, num_key_heads=K, out_THV=out)
        delta_settle(inputs, qkv, gates, tails, states, tried, ints(SLOTS - 1), num_key_heads=K)
        delta_decode(*of_layer, ints(T), ints(T), num_key_heads=K, out_BHV=out)
    names = ["_tried_prologue_kernel", "_delta_tried_kernel", "_settle_states_kernel", "_settle_tails_kernel"]
    assert [kernel.name for kernel in kernels] == [*names, "_delta_decode_kernel"]
    if capability == 90:
        assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels)
    _, finds, settles, _, decodes = kernels
    # A token's bits are the same: as many operations of each kind, by as many threads.
    assert arithmetic(finds) == arithmetic(decodes)
    assert "fma.rn.f32" in arithmetic(settles)
    assert all(layout(kernel) == layout(decodes) for kernel in (finds, settles))


def arithmetic(kernel: CompiledKernel) -> list[str]:
    """Its operations on fp32, without what they are on."""
    return sorted(re.findall(r"\b(?:fma|mul|add|sub|ex2)[.\w]*\.f32", kernel.asm["ptx"]))


def layout(kernel: CompiledKernel) -> str:
    """Of a state's columns."""
    text = kernel.asm["ttgir"]
    found = re.search(rf"tensor<{DIM}x64xf32, #(\w+)>", text)
    assert found
    return text.split(f"#{found[1]} = ")[1].splitlines()[0]


@pytest.mark.parametrize("capability", [90, long(80), long(89)])
@pytest.mark.parametrize(("H", "dtype"), [(32, BF16), long(48, FP16), long(16, FP32)])
def test_what_is_around_it(capability: int, H: int, dtype: torch.dtype) -> None:
    K, counts = 16, (64, 8192)
    channels = 2 * K * DIM + H * DIM
    columns = channels + H * DIM + 2 * H
    with compiling_for(capability) as kernels:
        for T in counts:
            for num_chunks in (0, 3):
                chunks = ints(num_chunks), ints(num_chunks), ints(num_chunks + 1)
                delta_prologue(
                    meta(T, columns, dtype=dtype), meta(SLOTS, TAPS - 1, channels, dtype=dtype),
                    meta(channels, TAPS, dtype=dtype), meta(H, dtype=FP32), meta(H, dtype=FP32), ints(32), ints(32),
                    *chunks, num_key_heads=K, key_dim=DIM, rows=ints(1),
                )  # fmt: skip
            z = meta(T, columns, dtype=dtype)
            x = meta(T, H, DIM, dtype=dtype)
            gated_head_norm(x, z, channels, meta(DIM, dtype=FP32), 1e-6, rows=ints(1))
            gate_by_sigmoid(meta(T, 4096, dtype=dtype), meta(T, 9216, dtype=dtype), 4096, rows=ints(1))
        copy_places(meta(36, SLOTS, H, DIM, DIM, dtype=FP32), ints(2, 2))
        copy_places(meta(36, SLOTS, TAPS - 1, channels, dtype=dtype), ints(2, 2))
    assert len(kernels) == 5 * len(counts) + 2
