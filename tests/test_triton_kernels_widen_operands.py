"""What compiled kernels give to the matrix units, without a GPU: the numbers that scaled weights stand for, 16 columns
to an instruction, in plain order, and x in the same."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ptx_machine import Copied, Machine
from scaled_weights import META, meant, scaled
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_experts import matmul_experts
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.scaled_weight import ScaledWeight

pytestmark = pytest.mark.skipif(INTERPRETED, reason="it knows no PTX")

N, K = 128, 1024
EXPERT, EXPERTS = 2, 3
# Numbers of the kernels' parameters: weights, scales, and rows, or of experts tiles' pairs and experts.
PARAMETERS = {"scaled": (10, 11, 15), "skinny": (1, 2, 5), "experts": (1, 2, 3, 4)}
long = pytest.mark.long


def config_of(kernel: str, block_k: int) -> MatmulConfig:
    if kernel == "skinny":
        return MatmulConfig("skinny", 8, 32, block_k, num_warps=2, num_stages=4)
    return MatmulConfig("scaled", 16, 64, block_k, num_warps=4, num_stages=4)


@pytest.mark.parametrize(
    ("kernel", "block_k", "groups", "four", "of_scales", "capability"),
    [
        ("scaled", 256, 8, True, None, 90),
        ("scaled", 256, 16, False, None, 90),
        ("skinny", 256, 8, True, None, 90),
        pytest.param("scaled", 256, 8, False, None, 90, marks=long),
        pytest.param("scaled", 128, 1, False, None, 90, marks=long),
        pytest.param("scaled", 64, 16, False, None, 90, marks=long),
        pytest.param("scaled", 128, 8, True, None, 90, marks=long),
        pytest.param("scaled", 256, 16, True, torch.float16, 90, marks=long),
        pytest.param("scaled", 128, 16, True, None, 90, marks=long),
        pytest.param("scaled", 256, 1, True, None, 90, marks=long),
        pytest.param("skinny", 256, 8, False, None, 90, marks=long),
        pytest.param("skinny", 256, 16, False, None, 90, marks=long),
        pytest.param("skinny", 256, 16, True, torch.float16, 90, marks=long),
        pytest.param("skinny", 128, 16, False, None, 89, marks=long),
        pytest.param("skinny", 128, 8, True, None, 80, marks=long),
        pytest.param("experts", 256, 8, True, None, 90, marks=long),
        pytest.param("experts", 256, 8, False, None, 90, marks=long),
        pytest.param("experts", 128, 16, True, None, 89, marks=long),
        pytest.param("experts", 128, 8, False, None, 89, marks=long),
    ],
)
def test_operands(
    kernel: str, block_k: int, groups: int, four: bool, of_scales: torch.dtype | None, capability: int
) -> None:  # fmt: skip
    config = config_of(kernel, block_k)
    w = scaled(N * EXPERTS if kernel == "experts" else N, K, groups, torch.bfloat16, four=four, of_scales=of_scales)
    # Numbers of x say which columns they are of, and which eight rows.
    x = (torch.arange(K) % 256).bfloat16().expand(config.block_m, K).contiguous()
    x[8:] *= -1.0
    machine = Machine(ptx_of(kernel, config, w, x, capability), parameters(kernel, config, w, x), block=1)
    first = config.block_n + (N * EXPERT if kernel == "experts" else 0)
    bits_NK = meant(w).view(torch.int16).long()[first:][: config.block_n] & 0xFFFF
    steps = Counter[int]()
    for product in machine.products():
        assert len(product.a) == config.block_n
        for of_eight in product.b.split(8, 1):
            signs, numbers = of_eight >> 15, (of_eight & 0x7FFF).to(torch.int32) << 16
            negative = int(signs[0, 0])
            places = numbers.view(torch.float32).long()
            assert (signs == negative).all()
            assert (places == places[:, :1]).all()
            step = steps[negative]
            columns = 16 * step // 256 * 256 + places[:, 0]
            assert columns.sort().values.tolist() == list(range(16 * step, 16 * step + 16))
            assert torch.equal(product.a, bits_NK[:, columns]), step
            steps[negative] += 1
        if all(steps[negative] == K // 16 for negative in range(config.block_m // 8)):
            return


def parameters(
    kernel: str, config: MatmulConfig, w: ScaledWeight, x: Tensor
) -> dict[int, int | Tensor | Copied]:  # fmt: skip
    numbers = w.numbers_NJ.view(torch.uint8)
    if kernel == "experts":
        work = work_of(x)
        return dict(enumerate((x, numbers, w.scales_GN, work.pairs_Q, work.experts_N)))
    given = dict(zip(PARAMETERS[kernel], (numbers, w.scales_GN, len(x)), strict=True))
    if kernel == "skinny":
        return {0: x, **given}
    width = min(config.block_k // (2 if w.four_bits else 1), 128)
    return {0: Copied(x.view(torch.uint8), (16, 128), 2), 5: Copied(numbers, (config.block_n, width), 1), **given}


def work_of(x: Tensor) -> ExpertWork:
    """One tile, of an expert that is not the first."""
    return ExpertWork(torch.arange(16, dtype=torch.int32), torch.tensor([EXPERT], dtype=torch.int32), 16, EXPERTS)


def ptx_of(kernel: str, config: MatmulConfig, w: ScaledWeight, x: Tensor, capability: int) -> str:
    on_meta = replace(w, numbers_NJ=w.numbers_NJ.to(META), scales_GN=w.scales_GN.to(META))
    with compiling_for(capability) as kernels:
        if kernel == "experts":
            work = work_of(x)
            work = replace(work, pairs_Q=work.pairs_Q.to(META), experts_N=work.experts_N.to(META))
            matmul_experts(x.to(META), on_meta, work)
        else:
            launch_matmul(config, x.to(META), on_meta, torch.empty(len(x), N, dtype=x.dtype, device=META))
    return str(kernels[-1].asm["ptx"])
