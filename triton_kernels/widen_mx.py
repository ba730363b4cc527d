"""From numbers of MXFP4, as `packed_mx` has stored them, to those that they stand for, in bfloat16: exact.

In a product's loop that happens in registers, and takes most of its instructions. Not in Triton's interpreter, which
knows no bfloat16.

Shape suffixes: N rows, J words of a row or their bytes.
"""

import triton
import triton.language as tl


def _unpacking_mx(word: str, low: str, high: str, *, by_halves: bool) -> str:
    """PTX that makes eight numbers of a word, times pairs of powers of two. A number's bits are moved to where bfloat16
    has its sign, the end of its exponent and the beginning of its fraction; its power makes up for the rest. Products
    move what they can: there is more room for these than for shifts. In words of two numbers, or `by_halves`."""
    lines = ["{", ".reg .b32 apart, minus_zero;", "mov.b32 minus_zero, 0x80008000;"]
    for out, (power, *moves) in enumerate(
        (
            (low, f"mov.b32 apart, {word};"),
            (low, f"mul.lo.u32 apart, {word}, {2**3};"),
            (high, f"and.b32 apart, {word}, 0x20072007;", f"mul.lo.u32 apart, apart, {2**2 + 2**6};"),
            (
                high,
                f"shr.u32 apart, {word}, 3;",
                "and.b32 apart, apart, 0x09c009c0;",
                f"mul.lo.u32 apart, apart, {1 + 2**4};",
            ),
        )
    ):
        lines += [*moves, "and.b32 apart, apart, 0x81c081c0;"]
        if by_halves:
            lines.append(f"fma.rn.bf16x2 apart, apart, {power}, minus_zero;")
            lines.append(f"mov.b32 {{${2 * out}, ${2 * out + 1}}}, apart;")
        else:
            lines.append(f"fma.rn.bf16x2 ${out}, apart, {power}, minus_zero;")
    return "\n".join([*lines, "}"])


_UNPACK_MX = tl.constexpr(_unpacking_mx("$4", "$5", "$9", by_halves=False))
_UNPACK_MX_WORDS = tl.constexpr(
    "{ .reg .b32 first, second; .reg .b16 low, high; mov.b32 {low, high}, $9;\n"
    "mov.b32 first, {low, low}; mov.b32 second, {high, high};\n"
    + _unpacking_mx("$8", "first", "second", by_halves=True)
    + "}"
)
_POWERS_OF_WORDS = tl.constexpr(
    "prmt.b32 $0, $2, 0, 0x4140; mul.lo.u32 $0, $0, 128; prmt.b32 $1, $2, 0, 0x4342; mul.lo.u32 $1, $1, 128;"
)
_FOUR_WORDS = tl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 9)
_EIGHT_HALVES = tl.constexpr("=&h," * 8 + "r,r")


@triton.jit
def halves_of_mx(both, powers, more_powers):
    """Of bytes [N, J] what their low bits stand for, and what their high bits do. Four that a thread has together are a
    word. Powers of two by `mx_powers`, [N, J]."""
    low, high = tl.inline_asm_elementwise(
        _UNPACK_MX, _FOUR_WORDS, [both, powers, more_powers], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
    )
    return low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)


@triton.jit
def mx_powers(words):
    """The power of two in the lowest byte of words (`with_powers`), twice, as bfloat16 has it."""
    return (words & 0xFF) * 0x800080


@triton.jit
def widen_mx(words, powers, TOGETHER: tl.constexpr):
    """MXFP4 on any card but in the interpreter: [N, J] words of eight numbers -> [N, 8 J] in bfloat16, in the order
    of `dealt_columns`. `powers`: of each row's blocks a word, [N, blocks]."""
    N: tl.constexpr = words.shape[0]
    J: tl.constexpr = words.shape[1]
    BLOCKS: tl.constexpr = powers.shape[1]
    even, odd = tl.inline_asm_elementwise(  # those of words 0 and 1 of a thread's four, and of 2 and 3
        _POWERS_OF_WORDS, "=&r,=&r,r", [powers], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    spread = tl.reshape(tl.join(even, odd), (N, BLOCKS, 1, 2, 1))
    spread = tl.reshape(tl.broadcast_to(spread, (N, BLOCKS, J // BLOCKS // 4, 2, 2)), (N, J))
    a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
        _UNPACK_MX_WORDS, _EIGHT_HALVES, [words, spread],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    low, high = tl.join(tl.join(a0, a1), tl.join(b0, b1)), tl.join(tl.join(c0, c1), tl.join(d0, d1))
    # Of blocks: threads, pairs of words, words, neighbours, both eights of an instruction, and both halves.
    apart = tl.reshape(tl.join(low, high), (N, BLOCKS, 4, 2, 2, 2, 2, 2))
    wide = tl.permute(apart, (0, 1, 7, 3, 4, 6, 2, 5)) if TOGETHER == 1 else tl.permute(apart, (0, 1, 7, 3, 6, 2, 4, 5))
    return tl.reshape(wide, (N, 8 * J)).to(tl.bfloat16, bitcast=True)
