"""Numbers of 16 bits as fp32, in Gluon: of bf16 two neighbours at a time, which lie in one register."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def to_fp32(x):
    """A pair of bf16 is one instruction for each; the compiler takes three for both."""
    if x.dtype == gl.bfloat16:
        halves: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(halves, "=r,=r,r", [x], gl.int32, True, 2).to(gl.float32, bitcast=True)
    return x.to(gl.float32)
