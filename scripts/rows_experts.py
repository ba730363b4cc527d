"""Rows of the kernel bench for models of many experts: a layer's block, from the choice of experts to their sum.

The product that routes is left out: it is one of many small ones. Routes are random, so nearly even. Of one model also
with weights of eight bits and four, and gpt-oss as it is stored and in plain numbers.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernel_rows import Row
from kernel_timing import Stopwatch
from random_weights import KINDS, ROUNDED, random_blocks, random_mxfp4, random_weight
from tercet.triton_kernels.clamped_gate import ClampedGate
from tercet.triton_kernels.expert_work import deal_out
from tercet.triton_kernels.matmul_experts import expert_tile, matmul_experts, matmul_experts_gated
from tercet.triton_kernels.route import route
from tercet.triton_kernels.scaled_weight import Weight
from tercet.triton_kernels.sum_experts import sum_experts

_SHAPES = (("30b-a3b", 128, 8, 2048, 768), ("mixtral", 8, 2, 4096, 14336))
_GPT_OSS = "gpt-oss-20b", 32, 4, 2880
_COPIES = 6


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for name, num_experts, each, hidden, inner in _SHAPES:
        gate_up = stopwatch.cut(0, num_experts, 2 * inner, hidden)
        down = stopwatch.cut(5, num_experts, hidden, inner)
        yield from _rows(stopwatch, name, "", num_experts, each, gate_up, down)
    name, num_experts, each, hidden, inner = _SHAPES[0]
    for kind, bits in KINDS.items():
        in_all = num_experts * 2 * inner, num_experts * hidden
        scaled = random_weight(bits, in_all[0], hidden), random_weight(bits, in_all[1], inner)
        yield from _rows(stopwatch, name, f" {kind}", num_experts, each, *scaled)
    for kind, of_rows in ROUNDED.items():
        first = random_blocks(in_all[0], hidden, of_rows=of_rows)
        second = random_blocks(in_all[1], inner, of_rows=of_rows)
        yield from _rows(stopwatch, name, f" {kind}", num_experts, each, first, second, (2048, 8192))
    name, num_experts, each, size = _GPT_OSS
    gate_up = stopwatch.cut(0, num_experts, 2 * size, size)
    yield from _rows(stopwatch, name, "", num_experts, each, gate_up, stopwatch.cut(5, num_experts, size, size))
    stored = random_mxfp4(num_experts * 2 * size, size), random_mxfp4(num_experts * size, size)
    yield from _rows(stopwatch, name, " mxfp4", num_experts, each, *stored)


def _rows(
    stopwatch: Stopwatch, name: str, kind: str, num_experts: int, each: int, gate_up: Weight, down: Weight,
    of_tokens: Sequence[int] = (1, 8, 64, 256, 2048, 8192),
) -> Iterator[Row]:  # fmt: skip
    hidden, inner = gate_up.shape[-1], down.shape[-1]
    biases = None
    if name == _GPT_OSS[0]:
        biases = stopwatch.cut(9, num_experts, 2 * inner), stopwatch.cut(10, num_experts, hidden)
    for tokens in of_tokens:
        x = stopwatch.cut(1 << 20, tokens, hidden)
        logits = [torch.randn(tokens, num_experts, device="cuda", dtype=x.dtype) for _ in range(_COPIES)]
        routes = [route(one, each, normed=True)[0] for one in logits]
        touched = sum(len(one.unique()) for one in routes) / _COPIES
        num_bytes = touched / num_experts * (gate_up.nbytes + down.nbytes) + 2 * x.nbytes
        num_flops = 6.0 * tokens * each * inner * hidden
        run = partial(_block, logits, x, num_experts, gate_up, down, biases, each)
        shape = f"{name} T={tokens}, {touched:.0f} of {num_experts}"
        yield Row(f"experts{kind}", shape, run, _COPIES, num_bytes, num_flops, nodes=12 if tokens <= 512 else 6)
        tile = expert_tile(tokens * each, num_experts, gate_up, down)
        if not kind and tile > 1:
            yield Row("deal_out", shape, partial(_deal, routes, num_experts, tile), _COPIES, 4.0 * tokens * each)


def _block(
    logits: list[Tensor], x: Tensor, num_experts: int, gate_up: Weight, down: Weight,
    biases: tuple[Tensor, Tensor] | None, each: int, index: int,
) -> None:  # fmt: skip
    experts, weights = route(logits[index], each, normed=True)
    work = deal_out(experts, num_experts, expert_tile(experts.numel(), num_experts, gate_up, down))
    clamp, down_bias = None, None
    if biases is not None:
        clamp, down_bias = ClampedGate(biases[0], 7.0, 1.702), biases[1]
    gated = matmul_experts_gated(x, gate_up, work, each, clamp)
    sum_experts(matmul_experts(gated, down, work), weights, None, experts, down_bias)


def _deal(routes: list[Tensor], num_experts: int, tile: int, index: int) -> None:
    deal_out(routes[index], num_experts, tile)
