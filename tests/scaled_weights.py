"""Random weights of eight bits and four, and the numbers that they stand for, column by column."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.scaled_weight import (
    E8M0,
    TILE,
    ScaledWeight,
    packed,
    packed_mx,
    stored,
    with_powers,
    with_tile_scales,
    with_zeros,
)

META = torch.device("meta")
MX_BITS = (15, 6), (12, 3), (13, 0), (14, 9)
"""Where in half a word of MXFP4 the signs of its four numbers are, and their other bits."""


def scaled(
    N: int, K: int, groups: int, dtype: torch.dtype, device: str = "cpu", *, four: bool = False,
    of_scales: torch.dtype | None = None,
) -> ScaledWeight:  # fmt: skip
    """Fresh each time; products of it are about as large as what they multiply. `of_scales`: `dtype`, if not told."""
    scales = (torch.rand(groups, N, device=device) + 0.5) * K**-0.5
    if four:
        numbers, zeros = (torch.randint(0, 16, size, device=device) for size in ((N, K), (groups, N)))
        of_scales = of_scales or dtype
        return ScaledWeight(packed(numbers), with_zeros((scales / 6).to(of_scales), zeros, dtype), dtype, of_scales)
    numbers = torch.randn(N, K, device=device).mul_(64).clamp_(-448, 448).to(FP8)
    return ScaledWeight(stored(numbers), scales / 64, dtype)


def mx(N: int, K: int, device: str = "cpu") -> ScaledWeight:
    """The same in MXFP4."""
    codes = torch.randint(0, 16, (N, -(-K // 128) * 128), device=device)
    codes[:, K:] = 0
    size = round(math.log2(K**-0.5 / 2.5)) + 127
    powers = torch.randint(size - 2, size + 3, (N, K // 32), device=device).to(torch.uint8)
    return ScaledWeight(packed_mx(codes), with_powers(powers), torch.bfloat16, E8M0, K)


def with_blocks(w: ScaledWeight) -> ScaledWeight:
    """The same with scales that even rows of each 128 share, and odd ones; ready for rows of eight bits."""
    scales = w.scales_GN.clone()
    for first in range(0, len(w), TILE):
        for odd in range(2):
            scales[:, first + odd : first + TILE : 2] = scales[:, first + odd, None]
    ready = with_tile_scales(replace(w, scales_GN=scales))
    assert ready.tile_scales is not None
    return ready


def rounded_rows(numbers_MK: Tensor, scales_MG: Tensor) -> Tensor:
    """What rows of eight bits stand for, column by column, in float64."""
    columns = torch.tensor([column // 64 * 64 + place(column % 64) for column in range(numbers_MK.shape[1])])
    numbers_MK = numbers_MK.double()[:, columns.to(numbers_MK.device)]
    return numbers_MK * scales_MG.double().repeat_interleave(TILE, 1)


def place(column: int) -> int:
    """Of a byte among the 64 of its block: 16 columns are an instruction's, of which a thread takes two neighbours, and
    two more 8 columns behind; the threads are four, and each has its own of four instructions together."""
    instruction, among = divmod(column, 16)
    half, rest = divmod(among, 8)
    thread, neighbour = divmod(rest, 2)
    return 16 * thread + 4 * instruction + 2 * half + neighbour


def meant(w: ScaledWeight) -> Tensor:
    """The numbers that it stands for, column by column: in float64 the product is exact, and so is rounded once to
    fp32."""
    return unrounded(w).float().to(w.dtype)


def unrounded(w: ScaledWeight) -> Tensor:
    """The same in float64, as products of one row take them."""
    four, scales = w.four_bits, w.scales_GN
    width = 128 if four else 64
    of_columns = [divmod(column, width) for column in range(w.shape[1])]
    within = torch.tensor([within for _, within in of_columns], device=w.device)
    places = [block * 64 + place(within % 64) for block, within in of_columns]
    bytes_NJ = w.numbers_NJ.view(torch.uint8)[:, torch.tensor(places, device=w.device)]
    if four:
        numbers = torch.where(within < 64, bytes_NJ % 16, bytes_NJ // 16).double()
        if w.is_mx:
            halves = w.numbers_NJ.view(torch.int16).int()[:, [place // 4 * 2 + place % 2 for place in places]]
            wheres = [
                MX_BITS[2 * (within // 64) + place % 4 // 2]
                for (_, within), place in zip(of_columns, places, strict=True)
            ]
            sign, rest = torch.tensor(wheres, device=w.device).T
            numbers = (halves >> sign & 1) * 8 + (halves >> rest & 7)
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=w.device)
            numbers = values[numbers.long() % 8] * torch.where(numbers > 7, -1, 1)
            columns = torch.arange(w.shape[1], device=w.device)
            byte = torch.tensor([0, 2, 1, 3], device=w.device)[columns % 128 // 32]
            powers = (scales.T[:, columns // 128] >> (byte * 8)) & 255
            return torch.ldexp(numbers, powers - 253)
        halves = scales.view(torch.int16).view(*scales.shape, 2)
        types = (w.of_scales, w.dtype)
        scales, zeros = (halves[..., i].contiguous().view(kind).double() for i, kind in enumerate(types))
        zeros -= {torch.bfloat16: 128, torch.float16: 1024}[w.dtype]
        assert 0 <= zeros.min() <= zeros.max() <= 15
        numbers -= zeros.T.repeat_interleave(w.group, 1)
    else:
        numbers = bytes_NJ.view(FP8).double()
    return numbers * scales.double().T.repeat_interleave(w.group, 1)


def of_meta(
    N: int, K: int, groups: int, *, four: bool = False, of_scales: torch.dtype | None = None
) -> ScaledWeight:  # fmt: skip
    numbers = torch.empty(N, K // 2 if four else K, dtype=torch.uint8 if four else FP8, device=META)
    scales = torch.empty(groups, N, dtype=torch.int32 if four else torch.float32, device=META)
    return ScaledWeight(numbers, scales, torch.bfloat16, of_scales or (torch.bfloat16 if four else torch.float32))


def on_meta(w: ScaledWeight) -> ScaledWeight:
    """Of such sizes."""
    return replace(w, numbers_NJ=w.numbers_NJ.to(META), scales_GN=w.scales_GN.to(META))
