"""What instructions of PTX make of registers: int64 with the bits of 32 in it, many values at once."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

KINDS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def bits_of(numbers: Tensor) -> Tensor:
    """As 32 bits, of two neighbours in 16 bits or of one in fp32; kept as int64, so that no shift has a sign."""
    return numbers.contiguous().view(torch.int32).to(torch.int64).reshape(-1) & 0xFFFFFFFF


def numbers_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """[registers, 2] of 16 bits, [registers] of fp32."""
    words = bits.to(torch.int32)
    return words.view(dtype) if dtype == torch.float32 else words.view(dtype).view(-1, 2)


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Once, and not by way of fp32."""
    digits, least = (8, -126) if dtype == torch.bfloat16 else (11, -14)
    _, exponent = np.frexp(exact.numpy())
    scale = np.ldexp(1.0, digits - np.maximum(exponent, least + 1))
    return torch.from_numpy(np.rint(exact.numpy() * scale) / scale).to(dtype)


def _permute(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    for place in range(4):
        chosen = (selector >> (4 * place)) & 7
        out |= ((torch.where(chosen < 4, a, b) >> (8 * (chosen % 4))) & 0xFF) << (8 * place)
    return out


def _fused(kind: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """In float64 products of such numbers are exact; so are these sums, and so all is rounded once."""
    dtype = KINDS[kind]
    exact = numbers_of(a, dtype).double() * numbers_of(b, dtype).double() + numbers_of(c, dtype).double()
    return bits_of(rounded(exact, dtype))


def _float32(bits: Tensor) -> Tensor:
    return numbers_of(bits, torch.float32)


def _from_fp8(two: Tensor) -> Tensor:
    bytes_ = torch.stack((two & 0xFF, two >> 8), 1).to(torch.uint8)
    return bits_of(bytes_.view(torch.float8_e4m3fn).half())


MEANINGS: dict[str, Callable[..., Tensor]] = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "mov.b32": lambda a: a,
    "prmt.b32": _permute,
    "fma.rn.bf16x2": lambda a, b, c: _fused("bf16x2", a, b, c),
    "fma.rn.f16x2": lambda a, b, c: _fused("f16x2", a, b, c),
    "cvt.f32.f16": lambda a: bits_of((a.to(torch.int16)).view(torch.float16).float()),
    "cvt.rn.f16x2.e4m3x2": _from_fp8,
    "cvt.rn.bf16x2.f32": lambda a, b: bits_of(torch.stack((_float32(b), _float32(a)), 1).bfloat16()),
    "sub.rn.f32": lambda a, b: bits_of(_float32(a) - _float32(b)),
    "mul.f32": lambda a, b: bits_of(_float32(a) * _float32(b)),
}
