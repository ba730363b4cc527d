"""Weights expanded: the numbers that they stand for. What the PTX means that makes those of four bits, instruction by
instruction: all numbers and zeros, all scales."""

import re

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from ptx_meanings import meaning, numbers_of, rounded
from scaled_weights import meant, scaled
from tercet.triton_kernels import widen
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.scaled_weight import expand_reference, with_zeros
from tercet.triton_kernels.widen import expand

Registers = dict[str, Tensor]
Operands = list[Tensor]


def run(ptx: str, inputs: Operands) -> Operands:
    """Its four outputs."""
    registers: Registers = {f"${4 + number}": operand for number, operand in enumerate(inputs)}

    def value(name: str) -> Tensor:
        return torch.full_like(inputs[0], int(name, 0)) if name[0].isdigit() else registers[name]

    for line in re.findall(r"[^;\n]+(?=;)", ptx):
        opcode, *names = line.replace(",", " ").split()
        if opcode == ".reg":
            continue
        if match := re.fullmatch(r"mov.b32 \{(\w+), (\w+)\}, (\$\d+)", line.strip()):
            registers[match[1]], registers[match[2]] = value(match[3]) & 0xFFFF, value(match[3]) >> 16
        else:
            registers[names[0]] = meaning(opcode, *map(value, names[1:]))
    return [registers[f"${number}"] for number in range(4)]


@pytest.mark.skipif(INTERPRETED, reason="it knows no PTX")
@pytest.mark.parametrize(
    ("ptx", "dtype", "of_scales"),
    [
        (widen._UNPACK_BF16.value, torch.bfloat16, torch.bfloat16),
        (widen._UNPACK_FP16.value, torch.float16, torch.float16),
        (widen._UNPACK_MIXED.value, torch.bfloat16, torch.float16),
    ],
)
def test_all_numbers(ptx: str, dtype: torch.dtype, of_scales: torch.dtype) -> None:
    """Fresh bytes with every scale that is positive and finite, each element with words of its own."""
    scales = torch.arange(1, 0x7C00 if of_scales == torch.float16 else 0x7F00, dtype=torch.int16).view(of_scales)
    scales = scales[scales <= 2.0**120]  # so that no product is infinite
    for zero in range(17):
        both = torch.randint(0, 256, (len(scales), 4))
        orders = [torch.randperm(len(scales)) for _ in range(8)]
        zeros = [torch.full_like(scales, zero if number % 2 else 16 - zero).long() for number in range(8)]
        words = [with_zeros(scales[order], z, dtype) for order, z in zip(orders, zeros, strict=True)]
        register = (both << torch.arange(0, 32, 8)).sum(1)
        got = run(ptx, [register, *(word.to(torch.int64) & 0xFFFFFFFF for word in words)])
        for number in range(8):
            numbers = (both[:, number % 4] >> (4 if number >= 4 else 0)) & 15
            exact = (numbers - zeros[number]).double() * scales[orders[number]].double()
            wanted = rounded(exact, dtype)
            assert torch.equal(numbers_of(got[number // 2], dtype)[:, number % 2], wanted), (zero, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("N", "K", "groups"), [(1, 64, 1), (5, 192, 3), (3, 5056, 1), (2, 8448, 66), (7, 384, 2)])
def test_expand(N: int, K: int, groups: int, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter rounds such numbers in its own way")
    w = scaled(N, K, groups, dtype)
    assert torch.equal(expand(w), meant(w))


@pytest.mark.parametrize("of_scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("N", "K", "groups"), [(1, 128, 1), (5, 256, 4), (3, 4224, 33), (2, 8448, 1), (7, 640, 5)])
def test_expand_four_bits(N: int, K: int, groups: int, dtype: torch.dtype, of_scales: torch.dtype) -> None:
    if of_scales not in (dtype, torch.float16):
        pytest.skip("no such scales are known")
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("as above")
    w = scaled(N, K, groups, dtype, four=True, of_scales=of_scales)
    assert torch.equal(expand(w), meant(w))


def test_references() -> None:
    kinds = [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)]
    weights = [scaled(9, 640, 5, dtype, four=four) for dtype, four in kinds]
    for w in (*weights, scaled(9, 640, 5, torch.bfloat16, four=True, of_scales=torch.float16)):
        assert torch.equal(expand_reference(w), meant(w))


def test_interpreted() -> None:
    rerun_interpreted(__file__)
