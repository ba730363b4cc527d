"""From numbers of eight bits or four, in the order in which they are stored, to those that they stand for.

In a product's loop that happens in registers: what a thread reads together it also multiplies.

Shape suffixes: N rows, J bytes of a row, K numbers of a row, G groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous
from tercet.triton_kernels.dispatch import INTERPRETED, use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.scaled_weight import BYTES, ScaledWeight, Weight, expand_reference
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.widen_mx import halves_of_mx, widen_mx

_BYTES = tl.constexpr(BYTES)
_COMPILED = tl.constexpr(not INTERPRETED)
_BLOCKS = 64
"""Blocks of as many bytes that a program expands."""


@triton.jit
def in_order(numbers, TOGETHER: tl.constexpr):
    """What `stored` has put in order, a tile of whole blocks [N, J], in that of `dealt_columns`."""
    apart = tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] // _BYTES, 4, 4 // TOGETHER, TOGETHER, 2, 2))
    return tl.reshape(tl.permute(apart, (0, 1, 3, 5, 2, 4, 6)), (numbers.shape[0], numbers.shape[1]))


@triton.jit
def dealt_columns(SIZE: tl.constexpr, TOGETHER: tl.constexpr):
    """Columns of a row of x in the order that weights are widened to; with one TOGETHER as they are.

    Where warps multiply by themselves (mma.sync) Triton lays operands out by the size of numbers where they are loaded:
    with eight bits a thread has four neighbours together, with four bits eight, and an instruction takes two of them.
    So dealt, what it takes are 16 real neighbours all the same, and sums are in plain order.
    """
    columns = tl.arange(0, SIZE)
    if TOGETHER > 1:  # or Triton would not see that they are neighbours
        instruction = columns // (16 * TOGETHER) * TOGETHER + columns // 2 % TOGETHER
        eight = instruction * 2 + columns // (8 * TOGETHER) % 2
        columns = eight * 8 + columns // (2 * TOGETHER) % 4 * 2 + columns % 2
    return columns


@triton.jit
def _load_scales(ptrs, k, N: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr):
    """The scale of each UNIT of a tile's columns from k on: [N, units], or [N, 1] if they share a group; N from each
    group to the next."""
    if GROUP % COLUMNS == 0:
        scales = tl.load(ptrs + k // GROUP * N)[:, None]
    else:
        groups = (k + UNIT * tl.arange(0, COLUMNS // UNIT)) // GROUP
        scales = tl.load(ptrs[:, None] + groups[None, :] * N)
    return scales


@triton.jit
def _spread(scales, COLUMNS: tl.constexpr):
    """[N, units] -> [N, COLUMNS], or [N, 1], which is as good."""
    units: tl.constexpr = scales.shape[1]
    if units > 1:
        rows: tl.constexpr = scales.shape[0]
        scales = tl.broadcast_to(scales[:, :, None], (rows, units, COLUMNS // units))
        scales = tl.reshape(scales, (rows, COLUMNS))
    return scales


@triton.jit
def widen(numbers, scales, dtype: tl.constexpr, TOGETHER: tl.constexpr):
    """A tile of FP8, [N, K], with its scales, [N, units]."""
    return (in_order(numbers, TOGETHER).to(tl.float32) * _spread(scales, numbers.shape[1])).to(dtype)


_REGISTERS = """.reg .b32 low, high, minus_one, less_zero, zero, scale, rest, one, other, own, above;
.reg .b16 left, right, up;"""
_PARTED = """mov.b32 {{left, up}}, ${first};
mov.b32 {{right, up}}, ${second};
cvt.f32.f16 one, left;
cvt.f32.f16 other, right;
cvt.rn.bf16x2.f32 scale, other, one;
shl.b32 own, scale, 16;
and.b32 above, scale, 0xffff0000;
sub.rn.f32 one, one, own;
sub.rn.f32 other, other, above;
cvt.rn.bf16x2.f32 rest, other, one;"""
"""Two scales in fp16 as two numbers in bf16 each, whose sum they are: eleven digits are eight and two. What a number of
four bits is times the rest has six, and so is exact; added to what it is times the first, all is rounded once."""


def _unpacking(kind: str, minus_one: str, *, scales_in_fp16: bool = False) -> str:
    """PTX that makes eight numbers of four bytes and of eight words. Behind the highest byte of a word, which is its
    zero's, a number's bits are units of a large one: its zero goes off exactly; then times the scale, rounded once."""
    lines = ["and.b32 low, $4, 0x0f0f0f0f;", "shr.u32 high, $4, 4;", "and.b32 high, high, 0x0f0f0f0f;"]
    lines += [f"mov.b32 minus_one, 0x{minus_one * 2};", "mov.b32 less_zero, 0x80008000;"]
    for out in range(4):  # two numbers each
        half, places, word = ("low", "high")[out // 2], ("0x7170", "0x7372")[out % 2], 5 + 2 * out
        lines += [
            f"prmt.b32 zero, ${word}, ${word + 1}, 0x7632;",
            f"prmt.b32 ${out}, {half}, ${word}, {places};",
            f"fma.rn.{kind} ${out}, zero, minus_one, ${out};",
        ]
        if scales_in_fp16:
            lines += _PARTED.format(first=word, second=word + 1).splitlines()
            lines.append(f"fma.rn.{kind} rest, ${out}, rest, less_zero;")
        else:
            lines += [f"prmt.b32 scale, ${word}, ${word + 1}, 0x5410;", "mov.b32 rest, less_zero;"]
        lines.append(f"fma.rn.{kind} ${out}, ${out}, scale, rest;")
    return "\n".join(["{", _REGISTERS, *lines, "}"])


_UNPACK_BF16, _UNPACK_FP16 = tl.constexpr(_unpacking("bf16x2", "bf80")), tl.constexpr(_unpacking("f16x2", "bc00"))
_UNPACK_MIXED = tl.constexpr(_unpacking("bf16x2", "bf80", scales_in_fp16=True))
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 9)


@triton.jit
def _halves(both, words, more_words, dtype: tl.constexpr, MIXED: tl.constexpr):
    """Of bytes [N, J] what their low bits stand for, and what their high bits do, by words as many, or [N, 1] of rows.
    MIXED: scales are in fp16, though numbers are in bf16."""
    if _COMPILED:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_MIXED if MIXED else _UNPACK_BF16 if dtype == tl.bfloat16 else _UNPACK_FP16, _OPERANDS,
            [both, words, more_words], dtype=(tl.int16, tl.int16), is_pure=True, pack=4,
        )  # fmt: skip
        return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
    low = (both & 15).to(tl.int32) - (words >> 16 & 0xFF)
    high = (both >> 4).to(tl.int32) - (more_words >> 16 & 0xFF)
    of_scales: tl.constexpr = tl.float16 if MIXED else dtype
    scales = words.to(tl.int16).to(of_scales, bitcast=True).to(tl.float32)
    more_scales = more_words.to(tl.int16).to(of_scales, bitcast=True).to(tl.float32)
    return (low * scales).to(dtype), (high * more_scales).to(dtype)


@triton.jit
def widen_four(both, words, more_words, dtype: tl.constexpr, FOUR: tl.constexpr, TOGETHER: tl.constexpr):
    """A tile of four bits, of whole blocks: [N, J] -> [N, 2 J]. Halves of blocks have their own words, [N, units]; of
    MXFP4 those are powers of two, [N, J], and a thread has whole words."""
    N: tl.constexpr = both.shape[0]
    J: tl.constexpr = both.shape[1]
    if FOUR == 3:
        low, high = halves_of_mx(both, words, more_words)
    else:
        low, high = _halves(both, _spread(words, J), _spread(more_words, J), dtype, FOUR == 2)
    wide = tl.join(in_order(low, TOGETHER), in_order(high, TOGETHER))
    return tl.reshape(tl.permute(tl.reshape(wide, (N, J // _BYTES, _BYTES, 2)), (0, 1, 3, 2)), (N, 2 * J))


@triton.jit
def load_wide(
    numbers, scale_ptrs, k, N: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, BLOCK_K: tl.constexpr,
    dtype: tl.constexpr, TOGETHER: tl.constexpr, HALF: tl.constexpr = BYTES,
):  # fmt: skip
    """What a tile of FP8 or FOUR bits from column k on stands for, with its scales; N from each group to the next.
    Of MXFP4 numbers are words.

    HALF stands in for `_BYTES`, of which as a constant of the module the interpreter takes no remainder.
    """
    if FOUR == 3:
        wide = widen_mx(numbers, _load_scales(scale_ptrs, k, N, GROUP, BLOCK_K, 2 * HALF), TOGETHER)
    elif FOUR:
        words = _load_scales(scale_ptrs, k, N, GROUP, BLOCK_K, 2 * HALF)
        more_words = words
        if GROUP % (2 * HALF):
            more_words = _load_scales(scale_ptrs, k + HALF, N, GROUP, BLOCK_K, 2 * HALF)
        wide = widen_four(numbers, words, more_words, dtype, FOUR, TOGETHER)
    else:
        unit: tl.constexpr = HALF if GROUP % (2 * HALF) or BLOCK_K % (2 * HALF) else 2 * HALF
        wide = widen(numbers, _load_scales(scale_ptrs, k, N, GROUP, BLOCK_K, unit), dtype, TOGETHER)
    return wide


@triton.jit
def awaited(acc):
    """A product's sums, and nothing that comes after them before they are known. Left to itself Triton widens the next
    weights while a product still reads the last ones, in registers that are thought to be free
    (triton-lang/triton#9433)."""
    if _COMPILED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def _expand_kernel(
    numbers_ptr, scales_ptr, out_ptr, N: tl.constexpr, J: tl.constexpr, GROUP: tl.constexpr,
    FOUR: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N, ceil(J / (BLOCKS * _BYTES))): one program expands so many blocks of a row. `numbers_ptr`: words of
    MXFP4, bytes of others."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < J // _BYTES
    width: tl.constexpr = 2 * _BYTES if FOUR else _BYTES
    size: tl.constexpr = 4 if FOUR == 3 else 1
    places = blocks[:, None] * (_BYTES // size) + tl.arange(0, _BYTES // size)[None, :]
    numbers = tl.load(numbers_ptr + row * (J // size) + places, mask=inside[:, None], other=0.0)
    groups = (blocks * width // GROUP).to(tl.int64) * N + row
    scales = tl.load(scales_ptr + groups, mask=inside, other=0)[:, None]
    if FOUR == 3:
        wide = widen_mx(numbers, scales, 1)
    elif FOUR:
        groups = ((blocks * width + _BYTES) // GROUP).to(tl.int64) * N + row
        more_scales = tl.load(scales_ptr + groups, mask=inside, other=0)[:, None]
        wide = widen_four(numbers, scales, more_scales, out_ptr.dtype.element_ty, FOUR, 1)
    else:
        wide = widen(numbers, scales, out_ptr.dtype.element_ty, 1)
    let_next_start(PDL)
    wait_for_previous(PDL)  # it may still read what was here
    columns = blocks[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(out_ptr + row * (J // _BYTES * width) + columns, wide, mask=inside[:, None])


def expand(w_NK: ScaledWeight) -> Tensor:
    """The numbers that it stands for: [N, K], in rows as long as it has them stored. Graph-safe."""
    N, J = w_NK.numbers_NJ.shape
    check_contiguous("w", w_NK.numbers_NJ)
    check_contiguous("w's scales", w_NK.scales_GN)
    if not use_kernels(w_NK.numbers_NJ):
        return expand_reference(w_NK)
    out_NK = torch.empty(N, w_NK.stored_columns, dtype=w_NK.dtype, device=w_NK.device)
    blocks = min(next_power_of_2(J // BYTES), _BLOCKS)
    numbers = w_NK.numbers_NJ.view(torch.int32) if w_NK.is_mx else w_NK.numbers_NJ
    _expand_kernel[(N, cdiv(J, blocks * BYTES))](
        numbers, w_NK.scales_GN, out_NK, N=N, J=J, GROUP=w_NK.group, FOUR=w_NK.kind, BLOCKS=blocks,
        num_warps=4, **overlap_options(out_NK),
    )  # fmt: skip
    return out_NK[:, : w_NK.shape[1]]


def plain(w_NK: Weight) -> Tensor:
    """Itself, or the numbers that it stands for."""
    return w_NK if isinstance(w_NK, Tensor) else expand(w_NK)
