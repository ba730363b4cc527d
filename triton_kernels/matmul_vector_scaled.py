"""Products for one row with weights of eight bits or four, in Gluon: as `matmul_vector.py`, no matrix units.

A thread loads 16 bytes of each of its rows of weights, as they are stored, and those numbers of x that they meet.
Numbers become fp32 as they are, and each sum over a thread's 16 bytes is scaled once: so nothing is rounded but the
result, and sums have an order of their own. Not for deterministic mode.

Shape suffixes: N rows of weights, U units of 16 bytes, W their words of four, K reduced size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.clamped_gate import gated_by
from tercet.triton_kernels.matmul_epilogue import ADD, is_gate
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.to_fp32 import to_fp32

_FLOATS_OF_FOUR = gl.constexpr((gl.float32,) * 8)
_FLOATS_OF_FP8 = gl.constexpr((gl.float32,) * 4)


def _parting(numbers: str, first: int) -> str:
    """PTX that makes two numbers in fp32 of a word of two in fp16."""
    return f"mov.b32 {{left, right}}, {numbers}; cvt.f32.f16 ${first}, left; cvt.f32.f16 ${first + 1}, right;"


def _unpacking_fp8() -> str:
    lines = ["{ .reg .b16 left, right, low, high; .reg .b32 two; mov.b32 {low, high}, $4;"]
    for first, half in ((0, "low"), (2, "high")):
        lines += [f"cvt.rn.f16x2.e4m3x2 two, {half};", _parting("two", first)]
    return " ".join([*lines, "}"])


def _unpacking_four() -> str:
    """A number's bits are units of 1024, or units of 16 where they are the upper ones of a byte. Numbers come in the
    order of bytes 0, 2, 1 and 3, the lower ones of two bytes before the upper ones."""
    lines = ["{ .reg .b16 left, right; .reg .b32 large, moved, two; mov.b32 large, 0x64006400; mov.b32 moved, $8;"]
    for first in (0, 4):
        for at, mask in ((first, "0x000f000f"), (first + 2, "0x00f000f0")):
            lines += [f"lop3.b32 two, moved, {mask}, large, 0xea;", _parting("two", at)]
        lines.append("shr.u32 moved, moved, 8;")
    return " ".join([*lines, "}"])


def _unpacking_mx() -> str:
    """In the order of bytes, the lower ones of all before the upper ones (`packed_mx`). A number's three bits are moved
    to where the exponent of fp16 ends and its fraction begins, its fourth to the sign: 2^14 times too small."""
    lines = ["{ .reg .b16 left, right; .reg .b32 moved, sign, two;"]
    for first, of_sign, of_rest in ((0, 0, 3), (2, 3, 6), (4, 2, 9), (6, 1, 0)):
        lines += [
            f"shl.b32 moved, $8, {of_sign}; and.b32 sign, moved, 0x80008000; shl.b32 moved, $8, {of_rest};",
            f"lop3.b32 two, moved, 0x0e000e00, sign, 0xea; {_parting('two', first)}",
        ]
    return " ".join([*lines, "}"])


_UNPACK_MX = gl.constexpr(_unpacking_mx())
_UNPACK_FP8, _UNPACK_FOUR = gl.constexpr(_unpacking_fp8()), gl.constexpr(_unpacking_four())


@gluon.constexpr_function
def _along(axis, layout):
    """Of numbers along one of a layout's axes, to be put into it by None for the others, from the first on."""
    for other in reversed(range(layout.rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _load_met(x_ptr, k, columns, X: gl.constexpr, HALVES: gl.constexpr):
    """Numbers of x in the order of the bytes that they meet (`stored` in scaled_weight.py): [U, W, 4, HALVES]. Of four
    bits a byte has two: for its lower bits, and for its upper ones."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4, 4, HALVES], [32, 1, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    x = gl.load(x_ptr + k + columns, mask=columns < X - k, other=0.0)
    apart = gl.reshape(x, (x.shape[0] // (64 * HALVES), HALVES, 4, 2, 4, 2))
    met = gl.reshape(gl.permute(apart, (0, 4, 2, 3, 5, 1)), (x.shape[0] // (16 * HALVES), 4, 4, HALVES))
    return gl.convert_layout(met, LAYOUT)


@gluon.jit
def _by_byte(x, LAYOUT: gl.constexpr):
    """[U, W, 4] -> four times [1, U, W]."""
    even, odd = gl.split(gl.reshape(x, (x.shape[0], x.shape[1], 2, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    SLICED: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    x0, x1 = gl.convert_layout(x0, SLICED)[None], gl.convert_layout(x1, SLICED)[None]
    return x0, x1, gl.convert_layout(x2, SLICED)[None], gl.convert_layout(x3, SLICED)[None]


@gluon.jit
def _sums_of_fp8(words, scales, x, LAYOUT: gl.constexpr):
    """Of units, [N, U], with scales."""
    x0, x1, x2, x3 = _by_byte(gl.reshape(to_fp32(x), (x.shape[0], 4, 4)), LAYOUT)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(_UNPACK_FP8, "=f,=f,=f,=f,r", [words], _FLOATS_OF_FP8, True, 1)
    return gl.sum(w3 * x3 + (w2 * x2 + (w1 * x1 + w0 * x0)), 2) * scales


@gluon.jit
def _sums_of_four(words, scales, x, HALVED: gl.constexpr, FOUR: gl.constexpr, LAYOUT: gl.constexpr):
    """The same. HALVED: the upper bits, which are numbers of other columns, have scales of their own."""
    BF16: gl.constexpr = x.dtype == gl.bfloat16
    low, high = gl.split(to_fp32(x))
    x0, x1, x2, x3 = _by_byte(low, LAYOUT)
    y0, y1, y2, y3 = _by_byte(high, LAYOUT)
    of_low, of_high = x0 + x1 + x2 + x3, y0 + y1 + y2 + y3
    units: gl.constexpr = 128.0 if BF16 else 1024.0
    y0, y1, y2, y3 = y0 * 0.0625, y1 * 0.0625, y2 * 0.0625, y3 * 0.0625
    w0, w2, v0, v2, w1, w3, v1, v3 = gl.inline_asm_elementwise(
        _UNPACK_FOUR, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [words], _FLOATS_OF_FOUR, True, 1
    )
    # What numbers are too large by, less what their zeros are.
    low, high = of_low * (units - 1024.0), of_high * (units - 64.0)
    if HALVED:
        low = w3 * x3 + (w1 * x1 + (w2 * x2 + (w0 * x0 + low)))
        high = v3 * y3 + (v1 * y1 + (v2 * y2 + (v0 * y0 + high)))
        return _scaled(low, of_low, scales[0], BF16, FOUR) + _scaled(high, of_high, scales[1], BF16, FOUR)
    sums = v0 * y0 + (w2 * x2 + (w0 * x0 + (low + high)))  # in the order in which numbers come: others take registers
    sums = v1 * y1 + (w3 * x3 + (w1 * x1 + (v2 * y2 + sums)))
    return _scaled(v3 * y3 + sums, of_low + of_high, scales[0], BF16, FOUR)


@gluon.jit
def _sums_of_mx(words, scales, x, LAYOUT: gl.constexpr):
    """The same of MXFP4: of each block's four powers of two the first two are for words 0 and 1 of each unit, for their
    lower bits and for the upper ones, the others for words 2 and 3."""
    low, high = gl.split(to_fp32(x))
    x0, x1, x2, x3 = _by_byte(low, LAYOUT)
    y0, y1, y2, y3 = _by_byte(high, LAYOUT)
    w0, w1, w2, w3, v0, v1, v2, v3 = gl.inline_asm_elementwise(
        _UNPACK_MX, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [words], _FLOATS_OF_FOUR, True, 1
    )
    low = w3 * x3 + (w1 * x1 + (w2 * x2 + w0 * x0))
    high = v3 * y3 + (v1 * y1 + (v2 * y2 + v0 * y0))
    powers = gl.expand_dims(scales, 2) >> (gl.arange(0, 4, _along(2, LAYOUT))[None, None, :] // 2 * 16)
    return gl.sum(low * _power(powers) + high * _power(powers >> 8), 2)


@gluon.jit
def _power(words):
    """By the lowest byte of words, less what `with_powers` adds and what `_unpacking_mx` leaves off, in fp32."""
    return (((words & 255) - 112) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _scaled(sums, of_x, scales, BF16: gl.constexpr, FOUR: gl.constexpr):
    """Sums of words, and of the numbers of x that they met: less the zeros' part, times the scales."""
    return (gl.sum(sums, 2) - _upper(scales, BF16) * gl.sum(of_x, 2)) * _upper(scales << 16, BF16 and FOUR == 1)


@gluon.jit
def _upper(words, BF16: gl.constexpr):
    """The upper halves of words, in fp32."""
    if BF16:
        return (words & -65536).to(gl.float32, bitcast=True)
    return (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.constexpr_function
def layout_of_vectors(block_n, warps):
    """Of words, [N, U, W]: a thread has one unit of all rows, and warps are side by side."""
    return gl.BlockedLayout([block_n, 1, 4], [1, 32, 1], [1, warps, 1], [2, 0, 1])


@gluon.jit
def rows_from(start_n, N: gl.constexpr, L: gl.constexpr):
    """A program's rows of weights, the last of all in place of those that are not there."""
    BLOCK_N: gl.constexpr = L.size_per_thread[0]
    rows = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    if N % BLOCK_N:
        rows = gl.minimum(rows, N - 1)
    return rows


@gluon.jit
def _units(L: gl.constexpr):
    """All that a program has of a row at once: as words have them, and as scales do."""
    UNITS: gl.constexpr = 32 * gl.num_warps()
    of_scales = gl.arange(0, UNITS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    return gl.arange(0, UNITS, _along(1, L))[None, :, None], of_scales


@gluon.jit
def _load_words(w_ptrs, units, k, num_units, WIDTH: gl.constexpr):
    """Of all rows, from column k on."""
    return gl.load(w_ptrs + k // WIDTH * 4, mask=units < num_units - k // WIDTH, other=0)


@gluon.constexpr_function
def _halved(group, width):
    """Whether a unit's lower and upper bits, of 64 columns each, can be of two groups."""
    return width == 32 and group % 128 != 0


@gluon.jit
def _load_scales(scale_ptrs, units, k, ROWS: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr):
    """Of all rows, from column k on, for a unit's lower bits and its upper ones."""
    columns = gl.minimum(k + units * WIDTH, K - WIDTH)
    if _halved(GROUP, WIDTH):
        columns = columns // 128 * 128
        upper = gl.load(scale_ptrs + (columns + 64) // GROUP * ROWS)
        return gl.load(scale_ptrs + columns // GROUP * ROWS), upper
    scales = gl.load(scale_ptrs + columns // GROUP * ROWS)
    return scales, scales


@gluon.jit
def begin_vectors(
    w_ptr, scales_ptr, rows, num_units, ROWS: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """Pointers to words and scales of `rows`, of ROWS in all, and the first of both: nothing of x."""
    units, of_scales = _units(L)
    n = gl.convert_layout(rows, _along(0, L), assert_trivial=True).to(gl.int64)
    w_ptrs = w_ptr + (n * (K // WIDTH * 4))[:, None, None] + units * 4 + gl.arange(0, 4, _along(2, L))[None, None, :]
    scale_ptrs = scales_ptr + rows[:, None]
    words = _load_words(w_ptrs, units, 0, num_units, WIDTH)
    scales = _load_scales(scale_ptrs, of_scales, 0, ROWS, K, GROUP, WIDTH)
    return w_ptrs, scale_ptrs, words, scales


@gluon.jit
def end_vectors(
    x_ptr, w_ptrs, scale_ptrs, words, scales, num_units, ROWS: gl.constexpr, K: gl.constexpr, X: gl.constexpr,
    GROUP: gl.constexpr, FOUR: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """The products of the row at `x_ptr`, of X columns, with those of the weights, [N], in fp32."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_K: gl.constexpr = 32 * WARPS * WIDTH
    units, of_scales = _units(L)
    columns = gl.arange(0, BLOCK_K, gl.BlockedLayout([8], [32], [WARPS], [0]))
    acc = gl.zeros(scales[0].shape, gl.float32, gl.SliceLayout(2, L))
    for k in gl.static_range(0, K, BLOCK_K):
        x = _load_met(x_ptr, k, columns, X, WIDTH // 16)
        if k:  # not ahead of the barrier that x needs: registers for two steps would leave room for fewer programs
            words = _load_words(w_ptrs, units, k, num_units, WIDTH)
            scales = _load_scales(scale_ptrs, of_scales, k, ROWS, K, GROUP, WIDTH)
        if FOUR == 3:
            acc += _sums_of_mx(words, scales[0], x, L)
        elif FOUR:
            acc += _sums_of_four(words, scales, x, _halved(GROUP, WIDTH), FOUR, L)
        else:
            acc += _sums_of_fp8(words, scales[0], x, L)
    return gl.sum(acc, 1)


@gluon.jit
def vector_scaled_kernel(
    x_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    FOUR: gl.constexpr, BLOCK_N: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / BLOCK_N),): one program owns BLOCK_N outputs. Its first weights load before it waits for x.

    `w_ptr`: words of four bytes. GROUP columns share a scale; 64 divides it.
    """
    WIDTH: gl.constexpr = 32 if FOUR else 16  # columns of a unit
    L: gl.constexpr = layout_of_vectors(BLOCK_N, gl.num_warps())
    start_n = gl.program_id(0) * BLOCK_N
    n = rows_from(start_n, N, L)
    num_units: gl.constexpr = K // WIDTH
    w_ptrs, scale_ptrs, words, scales = begin_vectors(w_ptr, scales_ptr, n, num_units, N, K, GROUP, WIDTH, L)
    let_next_start(PDL)
    wait_for_previous(PDL)
    y_N = end_vectors(x_ptr, w_ptrs, scale_ptrs, words, scales, num_units, N, K, K, GROUP, FOUR, WIDTH, L)
    _finish(y_N, n, start_n, bias_ptr, out_ptr, N, EPILOGUE, HAS_BIAS)


@gluon.jit
def _finish(y_N, n, start_n, bias_ptr, out_ptr, N: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Bias, gate or residual, rounding once, and the store."""
    if HAS_BIAS:
        y_N += gl.load(bias_ptr + n).to(gl.float32)
    if EPILOGUE == ADD:
        y_N += gl.load(out_ptr + n).to(gl.float32)
    store_vector(y_N, None, None, start_n, N, out_ptr, EPILOGUE)


@gluon.jit
def store_vector(y_N, limit, slope, start_n, end_n, out_ptr, EPILOGUE: gl.constexpr):
    """What lies ahead of `end_n`, rounded once; gate and up in turns are one number."""
    if is_gate(EPILOGUE):
        gate, up = gl.split(gl.reshape(y_N, (y_N.shape[0] // 2, 2)))
        y_N = gated_by(gate, up, limit, slope, EPILOGUE)
        start_n //= 2
        end_n //= 2
    places = start_n + gl.arange(0, y_N.shape[0], y_N.type.layout)
    gl.store(out_ptr + places, y_N.to(out_ptr.dtype.element_ty), mask=places < end_n)
