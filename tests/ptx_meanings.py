"""What instructions of PTX make of registers: int64 with their bits in it, many values at once."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tercet.triton_kernels.checks import FP8

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


def _logic(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Of each bit what the table has for those of a, b and c."""
    out = torch.zeros_like(a)
    for place in range(8):
        if int(table[0]) >> place & 1:
            wanted = zip((a, b, c), (4, 2, 1), strict=True)
            parts = [bits if place & weight else ~bits for bits, weight in wanted]
            out |= parts[0] & parts[1] & parts[2]
    return out & 0xFFFFFFFF


def _float32(bits: Tensor) -> Tensor:
    return numbers_of(bits, torch.float32)


def _from_fp8(two: Tensor) -> Tensor:
    bytes_ = torch.stack((two & 0xFF, two >> 8), 1).to(torch.uint8)
    return bits_of(bytes_.view(FP8).half())


_OF_FLOATS: dict[str, Callable[..., Tensor]] = {
    "prmt.b32": _permute,
    "fma.rn.bf16x2": lambda a, b, c: _fused("bf16x2", a, b, c),
    "fma.rn.f16x2": lambda a, b, c: _fused("f16x2", a, b, c),
    "cvt.f32.f16": lambda a: bits_of(a.to(torch.int16).view(torch.float16).float()),
    "cvt.f32.bf16": lambda a: bits_of(a.to(torch.int16).view(torch.bfloat16).float()),
    "cvt.rn.f16.f32": lambda a: bits_of(_float32(a).half().view(torch.int16).to(torch.int32) & 0xFFFF),
    "cvt.rn.bf16.f32": lambda a: bits_of(_float32(a).bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF),
    "cvt.rn.f16x2.e4m3x2": _from_fp8,
    "cvt.rn.f16x2.f32": lambda a, b: bits_of(torch.stack((_float32(b), _float32(a)), 1).half()),
    "cvt.rn.bf16x2.f32": lambda a, b: bits_of(torch.stack((_float32(b), _float32(a)), 1).bfloat16()),
    "sub.rn.f32": lambda a, b: bits_of(_float32(a) - _float32(b)),
    "add.f32": lambda a, b: bits_of(_float32(a) + _float32(b)),
    "sub.f32": lambda a, b: bits_of(_float32(a) - _float32(b)),
    "neg.f32": lambda a: bits_of(-_float32(a)),
    "ex2.approx.f32": lambda a: bits_of(_float32(a).exp2()),
    "div.full.f32": lambda a, b: bits_of(_float32(a) / _float32(b)),
    "fma.rn.f32": lambda a, b, c: bits_of((_float32(a).double() * _float32(b) + _float32(c)).float()),
    "lop3.b32": _logic,
    "mul.f32": lambda a, b: bits_of(_float32(a) * _float32(b)),
    "min.f32": lambda a, b: bits_of(torch.fmin(_float32(a), _float32(b))),
    "max.f32": lambda a, b: bits_of(torch.fmax(_float32(a), _float32(b))),
}
_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge
}  # fmt: skip
_OF_INTEGERS: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "mad": lambda a, b, c: a * b + c,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "min": torch.minimum,
    "max": torch.maximum,
    "div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "rem": torch.fmod,
}
_OF_PREDICATES: dict[str, Callable[..., Tensor]] = {
    "and": torch.bitwise_and, "or": torch.bitwise_or, "not": lambda a: 1 - a
}  # fmt: skip


def meaning(opcode: str, *values: Tensor) -> Tensor:
    """The result's bits; a KeyError for what is not known here."""
    if opcode in _OF_FLOATS:
        return _OF_FLOATS[opcode](*values)
    kind, *between, last = opcode.split(".")
    if kind in ("mov", "ld", "cvta"):
        return values[0]
    if last == "pred":
        return _OF_PREDICATES[kind](*values)
    if last[0] == "f" and kind != "selp":
        raise KeyError(opcode)
    bits, signed = int(last[1:]), last[0] == "s"
    if kind == "selp":
        return torch.where(values[2].bool(), values[0], values[1])
    if kind == "bfe":
        return _bits(_integer(values[0] >> values[1], int(values[2][0]), signed), bits)
    if kind == "cvt":
        return _bits(_integer(values[0], bits, signed), int(between[0][1:]))
    read = [_integer(value, bits, signed) for value in values]
    if kind == "setp":
        if last == "u64":  # int64 has a sign: halves of the range change places
            read = [value + torch.iinfo(torch.int64).min for value in read]
        return _COMPARE[between[0]](*read).long()
    if "wide" in between:  # what is added has twice the bits, too
        return _OF_INTEGERS[kind](*read[:2], *values[2:])
    if "hi" in between:  # of products below 2^63
        return _bits(_OF_INTEGERS[kind](*read) >> bits, bits)
    return _bits(_OF_INTEGERS[kind](*read), bits)


def _integer(value: Tensor, bits: int, signed: bool) -> Tensor:
    value = _bits(value, bits)
    return torch.where(value >> (bits - 1) > 0, value - (1 << bits), value) if signed and bits < 64 else value


def _bits(value: Tensor, bits: int) -> Tensor:
    return value & ((1 << bits) - 1) if bits < 64 else value
