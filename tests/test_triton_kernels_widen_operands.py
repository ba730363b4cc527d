"""What compiled kernels give to the matrix units, without a GPU: the numbers that scaled weights stand for, 16 columns
to an instruction, in plain order, and x in the same."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covering import long
from ptx_machine import Copied, Machine
from scaled_weights import META, meant, mx, on_meta, scaled
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_experts import matmul_experts
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.scaled_weight import ScaledWeight

pytestmark = pytest.mark.skipif(INTERPRETED, reason="it knows no PTX")

N, K = 128, 1024
BLOCK = 128
"""Columns of a tile of two warp groups' rows: one's products come ahead of the other's."""
EXPERT, EXPERTS = 2, 3
# One tile, of an expert that is not the first.
WORK = ExpertWork(torch.arange(16, dtype=torch.int32), torch.tensor([EXPERT], dtype=torch.int32), 16, EXPERTS)
# Numbers of the kernels' parameters: weights, scales and how many rows.
PARAMETERS = {"scaled": (10, 11, 15), "skinny": (1, 2, 5)}


def tiles(columns: int) -> MatmulConfig:
    return MatmulConfig("scaled", 16, 64, columns, num_warps=4, num_stages=4)


def few(columns: int) -> MatmulConfig:
    return MatmulConfig("skinny", 8, 32, columns, num_warps=2, num_stages=4)


@pytest.mark.parametrize(
    ("config", "groups", "four", "of_scales", "capability"),
    [
        (tiles(256), 8, True, None, 90),
        (tiles(256), 16, False, None, 90),
        (few(256), 8, True, None, 90),
        long(tiles(256), 8, False, None, 90),
        long(tiles(128), 1, False, None, 90),
        long(tiles(64), 16, False, None, 90),
        long(tiles(128), 8, True, None, 90),
        long(tiles(256), 16, True, torch.float16, 90),
        long(tiles(128), 16, True, None, 90),
        long(tiles(256), 1, True, None, 90),
        long(few(256), 8, False, None, 90),
        long(few(256), 16, False, None, 90),
        long(few(256), 16, True, torch.float16, 90),
        long(few(128), 16, False, None, 89),
        long(few(128), 8, True, None, 80),
    ],
    ids=lambda value: f"{value.kernel}{value.block_k}" if isinstance(value, MatmulConfig) else None,
)
def test_products(
    config: MatmulConfig, groups: int, four: bool, of_scales: torch.dtype | None, capability: int
) -> None:  # fmt: skip
    w, x = scaled(N, K, groups, torch.bfloat16, four=four, of_scales=of_scales), rows(config.block_m)
    with compiling_for(capability) as kernels:
        launch_matmul(config, x.to(META), on_meta(w), torch.empty(len(x), N, dtype=x.dtype, device=META))
    numbers = w.numbers_NJ.view(torch.uint8)
    given = dict(zip(PARAMETERS[config.kernel], (numbers, w.scales_GN, len(x)), strict=True))
    if config.kernel == "skinny":
        given[0] = x
    else:
        width = min(config.block_k // (2 if four else 1), 128)
        given |= {0: Copied(x.view(torch.uint8), (16, 128), 2), 5: Copied(numbers, (config.block_n, width), 1)}
    check(kernels[-1].asm["ptx"], given, w[config.block_n : 2 * config.block_n], len(x))


@pytest.mark.parametrize(
    ("groups", "four", "capability"),
    [long(8, True, 90), long(8, False, 90), long(16, True, 89), long(8, False, 89)],
)
def test_experts(groups: int, four: bool, capability: int) -> None:
    check_experts(scaled(EXPERTS * N, K, groups, torch.bfloat16, four=four), capability)


@pytest.mark.parametrize("capability", [90, long(80)])
def test_experts_in_mxfp4(capability: int) -> None:
    check_experts(mx(EXPERTS * N, K), capability)


def check_experts(w: ScaledWeight, capability: int) -> None:
    x, numbers = rows(WORK.tile), w.numbers_NJ.view(torch.uint8)
    work = replace(WORK, pairs_Q=WORK.pairs_Q.to(META), experts_N=WORK.experts_N.to(META))
    with compiling_for(capability) as kernels:
        matmul_experts(x.to(META), on_meta(w), work)
    of_work = w.scales_GN, WORK.pairs_Q, WORK.experts_N
    if capability < 90:
        first = EXPERT * N + 64
        check(kernels[-1].asm["ptx"], dict(enumerate((x, numbers, *of_work))), w[first : first + 64], len(x))
        return
    given: dict[int, int | Tensor | Copied] = {0: Copied(x.view(torch.uint8), (16, 128), 2)}
    width, itemsize = (64, 4) if w.is_mx else (64 if w.four_bits else 128, 1)
    given |= {5: Copied(numbers, (128, width), itemsize), **dict(enumerate(of_work, 10))}
    check(kernels[-1].asm["ptx"], given, w[EXPERT * N : (EXPERT + 1) * N], len(x), block=0)


def rows(count: int) -> Tensor:
    """Whose numbers say which column they are of, and which eight rows."""
    x = (torch.arange(K) % 256).bfloat16().expand(count, K).contiguous()
    x[8:] *= -1.0
    return x


def check(
    ptx: str, parameters: dict[int, int | Tensor | Copied], w_NK: ScaledWeight, num_rows: int, block: int = 1
) -> None:
    """This block of the grid multiplies these rows of weights."""
    bits_NK = meant(w_NK).view(torch.int16).long() & 0xFFFF
    steps = Counter[tuple[int, int]]()
    for product in Machine(ptx, parameters, block=block).products():
        parts = bits_NK.split(len(product.a))  # of whole warp groups
        for of_eight in product.b.split(8, 1):
            signs, numbers = of_eight >> 15, (of_eight & 0x7FFF).to(torch.int32) << 16
            negative, places = int(signs[0, 0]), numbers.view(torch.float32).long()
            assert (signs == negative).all()
            assert (places == places[:, :1]).all()
            part = min(range(len(parts)), key=lambda part: steps[part, negative] // (BLOCK // 16) * len(parts) + part)
            step = steps[part, negative]
            columns = 16 * step // 256 * 256 + places[:, 0]
            assert columns.sort().values.tolist() == list(range(16 * step, 16 * step + 16))
            assert torch.equal(product.a, parts[part][:, columns]), step
            steps[part, negative] += 1
        wanted = {(part, negative): K // 16 for part in range(len(parts)) for negative in range(num_rows // 8)}
        if steps == wanted:
            return
