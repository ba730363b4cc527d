"""Block sizes of products with experts' weights.

Knows sizes and cards; launches nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.triton_kernels.dispatch import has_little_shared_memory
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.tiles import cdiv, next_power_of_2


@dataclass(frozen=True)
class Blocks:
    """The sizes of one program's work. Its rows are a tile of pairs."""

    n: int
    k: int
    warps: int
    stages: int


def blocks_of(tile: int, x: Tensor) -> Blocks:
    """Few rows are about bytes on their way, many about what is multiplied for each byte."""
    if x.dtype == torch.float32:
        return Blocks(n=32, k=32, warps=4, stages=2)
    if has_little_shared_memory(x.device):
        return Blocks(n=64, k=64, warps=4, stages=3)
    if tile <= 32:
        return Blocks(n=128, k=128, warps=4, stages=3)
    return Blocks(n=256, k=64, warps=8, stages=3 if tile == 64 else 4)


def scaled_blocks_of(tile: int, w_RK: ScaledWeight) -> Blocks:
    """Where the copy engine cannot bring them (`experts_placed.py`)."""
    stages = 3 if has_little_shared_memory(w_RK.device) or tile == 128 else 4
    return Blocks(n=64, k=min(w_RK.widest, 128), warps=4, stages=stages)


def warps_of_vector(num_words: int) -> int:
    """That have eight words a thread or so, but fewer where some of them would have none in the last round."""
    warps = min(next_power_of_2(cdiv(num_words, 256)), 4)
    while warps > 1 and cdiv(num_words, 128 * warps) * warps > cdiv(num_words, 64 * warps) * (warps // 2):
        warps //= 2
    return warps
