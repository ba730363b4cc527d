"""Rows of the kernel bench for models of many experts: a layer's block, from the choice of experts to their sum.

The product that routes is left out: it is one of many small ones. Routes are random, so nearly even.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.expert_work import deal_out
from tercet.triton_kernels.matmul_experts import expert_tile, matmul_experts, matmul_experts_silu_and_mul
from tercet.triton_kernels.route import route
from tercet.triton_kernels.sum_experts import sum_experts

_SHAPES = (("30b-a3b", 128, 8, 2048, 768), ("mixtral", 8, 2, 4096, 14336))
_COPIES = 6


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for name, num_experts, each, hidden, inner in _SHAPES:
        gate_up = stopwatch.cut(0, num_experts, 2 * inner, hidden)
        down = stopwatch.cut(5, num_experts, hidden, inner)
        for tokens in (1, 8, 64, 256, 2048, 8192):
            x = stopwatch.cut(1 << 20, tokens, hidden)
            logits = [torch.randn(tokens, num_experts, device="cuda", dtype=x.dtype) for _ in range(_COPIES)]
            routes = [route(one, each, normed=True)[0] for one in logits]
            touched = sum(len(one.unique()) for one in routes) / _COPIES
            num_bytes = 2.0 * (touched * 3 * inner * hidden + 2 * tokens * hidden)
            num_flops = 6.0 * tokens * each * inner * hidden
            run = partial(_block, logits, x, gate_up, down, each)
            shape = f"{name} T={tokens}, {touched:.0f} of {num_experts}"
            yield Row("experts", shape, run, _COPIES, num_bytes, num_flops, nodes=12 if tokens <= 512 else 6)
            yield Row("deal_out", shape, partial(_deal, routes, num_experts), _COPIES, 4.0 * tokens * each)


def _block(logits: list[Tensor], x: Tensor, gate_up: Tensor, down: Tensor, each: int, index: int) -> None:
    experts, weights = route(logits[index], each, normed=True)
    work = deal_out(experts, len(down), expert_tile(experts.numel(), len(down)))
    gated = matmul_experts_silu_and_mul(x, gate_up, work, each)
    sum_experts(matmul_experts(gated, down, work), weights)


def _deal(routes: list[Tensor], num_experts: int, index: int) -> None:
    deal_out(routes[index], num_experts, expert_tile(routes[index].numel(), num_experts))
