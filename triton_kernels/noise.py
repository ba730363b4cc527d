"""Counter-based noise for sampling: Gumbel(seed, position, token id), the same whatever else is in the batch.

Integers are hashed alike in Triton and PyTorch, so both draw the same uniform bits. Knows no logits.

The token drawn is the argmax of logit / temperature + Gumbel: exactly a draw from the softmax. A hash of a row's seed
and position gives two keys, 64 bits as the seed has; each token id is hashed with them in three rounds of multiply and
xor-shift.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tercet.triton_kernels.dispatch import INTERPRETED

_MULTIPLY_1: tl.constexpr = tl.constexpr(0x7FEB352D)
_MULTIPLY_2: tl.constexpr = tl.constexpr(0x846CA68B)
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B9)
_LOG_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_BELOW_ONE: tl.constexpr = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= _MULTIPLY_1
    x ^= x >> 15
    x *= _MULTIPLY_2
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed, position):
    """The two uint32 keys of a row, from its int64 seed and the position of the token it samples.

    Every seed has its own pair of keys at a position. Both take the position in, each in another way: no seed has the
    pairs of another some positions later.
    """
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    of_low = _mix(low + tl.full([], _GOLDEN, tl.uint32))
    key_1 = _mix(_mix(of_low ^ high) + position.to(tl.uint32))
    return key_1, _mix((key_1 ^ of_low) + position.to(tl.uint32))


@triton.jit
def _log2(x):
    """By the device's own instruction, off by 2e-7 at most around 1; `tl.log2` takes 25 of them to be nearer."""
    return tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def gumbel(token_ids, key_1, key_2):
    """Gumbel noise, fp32, of token ids under a row's keys.

    Products that are added to are spelled out as fma, here and by callers: the same bits in every kernel.
    """
    x = token_ids.to(tl.uint32) ^ key_1
    x ^= x >> 16
    x *= _MULTIPLY_1
    x ^= x >> 15
    x += key_2
    x *= _MULTIPLY_2
    x ^= x >> 13
    x *= _MULTIPLY_1
    x ^= x >> 16
    uniform = tl.minimum(tl.fma(x.to(tl.float32), 2.0**-32, 2.0**-33), _BELOW_ONE)
    # The likely winners are small uniforms: log1p by its series there, so that none of their bits is lost.
    series = tl.fma(uniform, tl.fma(uniform, tl.fma(uniform, 0.25, 0.33333333), 0.5), 1.0) * uniform
    exponential = tl.where(uniform < 0.015625, series, _log2(1.0 - uniform) * -_LOG_2)
    return _log2(exponential) * -_LOG_2


def gumbel_reference(seed_N: Tensor, position_N: Tensor, num_tokens: int, first: int = 0) -> Tensor:
    """The same in PyTorch, for `num_tokens` token ids from `first` on: [N] -> [N, num_tokens] fp32."""
    position_N = position_N.to(torch.int32)
    of_low = _mix_reference(_int32((seed_N & 0xFFFFFFFF) + 0x9E3779B9))
    key_1 = _mix_reference(_mix_reference(of_low ^ _int32(seed_N >> 32)) + position_N)
    key_2 = _mix_reference((key_1 ^ of_low) + position_N)
    x = torch.arange(first, first + num_tokens, dtype=torch.int32, device=seed_N.device) ^ key_1[:, None]
    x ^= _shift(x, 16)
    x *= 0x7FEB352D
    x ^= _shift(x, 15)
    x += key_2[:, None]
    x *= 0x846CA68B - 2**32
    x ^= _shift(x, 13)
    x *= 0x7FEB352D
    x ^= _shift(x, 16)
    uniform = (x.long() & 0xFFFFFFFF).to(torch.float32)
    uniform.mul_(2.0**-32).add_(2.0**-33).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix_reference(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shift(x, 16)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int32 right as if it had no sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _int32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 numbers, as int32."""
    x = x & 0xFFFFFFFF
    return (x - ((x & 0x80000000) << 1)).to(torch.int32)
