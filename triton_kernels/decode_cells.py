"""What decode attention on Hopper makes of a cache in FP8 (`float8e4nv`), in Gluon: fp16, in which it multiplies.

A matrix of bytes cannot be turned on its way from shared memory to registers, one of 16 bits can. So two numbers of a
head that are neighbours go that way as one, and are parted in registers: first all even ones of a half, then all odd
ones. Queries are brought into that order, and sums are stored from it; elsewhere cells are what they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PART = gl.constexpr("""{
.reg .b32 bytes; .reg .b16 even, odd;
prmt.b32 bytes, $2, 0, 0x3120;
mov.b32 {even, odd}, bytes;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}""")

_ROUND = gl.constexpr("""{
.reg .b16 bytes;
cvt.rn.satfinite.e4m3x2.f32 bytes, $2, $1;
cvt.rn.f16x2.e4m3x2 $0, bytes;
}""")


@gluon.jit
def as_factor(q, cell: gl.constexpr):
    """Queries, rounded once to the type in which cells are multiplied, and never to infinity."""
    return gl.minimum(gl.maximum(q, -65504.0), 65504.0).to(gl.float16) if cell == gl.float8e4nv else q.to(cell)


@gluon.jit
def as_cached(x, cell: gl.constexpr):
    """The newest token's numbers, rounded once to what the cache will hold; of FP8 in fp16.

    Both at once: of two bytes that are to be stored, too, ptxas 12.8 makes wrong numbers when it turns them back later.
    """
    if cell == gl.float8e4nv:
        x = gl.inline_asm_elementwise(_ROUND, "=r,r,r", [x.to(gl.float32)], gl.float16, True, 2)
    else:
        x = x.to(cell)
    return x


@gluon.jit
def _part(x):
    """The even numbers and the odd ones of pairs, side by side in a last dimension of two."""
    even, odd = gl.inline_asm_elementwise(_PART, "=r,=r,r", [x], (gl.float16, gl.float16), True, 2)
    return gl.join(even, odd)


@gluon.jit
def load_keys(cells, LAYOUT: gl.constexpr):
    """[tokens, half a head] from a tile of keys."""
    x = cells.load(LAYOUT)
    if cells.dtype == gl.int16:
        parts = gl.permute(_part(x), (0, 2, 1))
        x = gl.convert_layout(gl.reshape(parts, (x.shape[0], 2 * x.shape[1])), LAYOUT)
    return x


@gluon.jit
def load_values(cells, LAYOUT: gl.constexpr):
    """[half a head, tokens] from a tile of values."""
    x = cells.permute((1, 0)).load(LAYOUT)
    if cells.dtype == gl.int16:
        parts = gl.permute(_part(x), (2, 0, 1))
        x = gl.convert_layout(gl.reshape(parts, (2 * x.shape[0], x.shape[1])), LAYOUT)
    return x


@gluon.jit
def even_first(x, PAIRED: gl.constexpr):
    """Half a head, or that of each row, in the order of `load_keys`."""
    if PAIRED:
        if len(x.shape) == 1:
            pairs = gl.permute(gl.reshape(x, (x.shape[0] // 2, 2)), (1, 0))
        else:
            pairs = gl.permute(gl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), (0, 2, 1))
        x = gl.convert_layout(gl.reshape(pairs, x.shape), x.type.layout)
    return x


@gluon.jit
def numbers_of_half(HALF: gl.constexpr, LAYOUT: gl.constexpr, PAIRED: gl.constexpr):
    """Which number of a half stands in each place."""
    places = gl.arange(0, HALF, LAYOUT)
    if PAIRED:
        places = places % (HALF // 2) * 2 + places // (HALF // 2)
    return places
