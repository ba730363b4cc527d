"""Weights of eight bits or four for the kernel bench, of a size as `[rows, columns]`."""

import torch

from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.scaled_weight import (
    BYTES,
    E8M0,
    MX_GROUP,
    TILE,
    ScaledWeight,
    with_powers,
    with_tile_scales,
    with_zeros,
)

KINDS = {"fp8": 8, "four bits": 4}
_GROUP = 128


def random_weight(bits: int, rows: int, columns: int) -> ScaledWeight:
    """On the GPU, for bf16: any bytes but those that are no numbers, and small scales."""
    scales = torch.rand(columns // _GROUP, rows, device="cuda") * columns**-0.5
    if bits == 8:
        numbers = torch.randint(0, 127, (rows, columns), dtype=torch.uint8, device="cuda").view(FP8)
        return ScaledWeight(numbers, scales / 64, torch.bfloat16)
    numbers = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    zeros = torch.randint(0, 16, scales.shape, device="cuda")
    return ScaledWeight(
        numbers, with_zeros((scales / 6).bfloat16(), zeros, torch.bfloat16), torch.bfloat16, torch.bfloat16
    )


def random_blocks(rows: int, columns: int) -> ScaledWeight:
    """The same in FP8 with scales of blocks, for products that round rows, too."""
    numbers = torch.randn(rows, columns, device="cuda").mul_(64).clamp_(-448, 448).to(FP8)
    scales = torch.rand(columns // TILE, -(-rows // TILE), device="cuda") * columns**-0.5 / 64
    weight = ScaledWeight(numbers, scales.repeat_interleave(TILE, 1)[:, :rows].contiguous(), torch.bfloat16)
    return with_tile_scales(weight)


def random_mxfp4(rows: int, columns: int) -> ScaledWeight:
    """The same in MXFP4: of what fills up columns numbers are no zeros, which takes as long."""
    blocks = -(-columns // (2 * BYTES))
    numbers = torch.randint(0, 256, (rows, blocks * BYTES), dtype=torch.uint8, device="cuda")
    powers = torch.randint(119, 122, (rows, columns // MX_GROUP), device="cuda").to(torch.uint8)
    return ScaledWeight(numbers, with_powers(powers), torch.bfloat16, E8M0, columns)
