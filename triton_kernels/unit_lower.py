"""The inverse of a unit lower triangular matrix, in registers.

By substitution within blocks on the diagonal, and from there by products that merge two neighbours into one of twice
their size. Only numbers of the inverse's own size are made on the way: a series of powers would lose all digits where
keys are alike.
"""

import triton
import triton.language as tl


@triton.jit
def _split(x):
    """Halves of fp32 that are no longer than 16 bits: together 22 bits of what is not much larger than 1."""
    upper = x.to(tl.float16)
    return upper, (x - upper.to(tl.float32)).to(tl.float16)


@triton.jit
def _merge(a, x, SIZE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses of blocks of WIDTH on the diagonal to those of twice as many rows."""
    rows, columns = tl.arange(0, SIZE)[:, None] // WIDTH, tl.arange(0, SIZE)[None, :] // WIDTH
    below = (rows == columns + 1) & (columns % 2 == 0)
    if PRECISION == "halves":
        upper, lower = _split(tl.where(below, -a, 0.0))
        upper_x, lower_x = _split(x)
        through = tl.dot(upper, upper_x, tl.dot(upper, lower_x, tl.dot(lower, upper_x)))
        upper, lower = _split(through)
        x = tl.dot(upper_x, upper, tl.dot(upper_x, lower, tl.dot(lower_x, upper, x)))
    else:
        through = tl.dot(tl.where(below, a, 0.0), x, input_precision=PRECISION)
        x -= tl.dot(x, through, input_precision=PRECISION)
    return x


@triton.jit
def invert_unit_lower(a, SIZE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of [SIZE, SIZE] in fp32, zeros on and above the diagonal of `a`. SIZE is BLOCK * 2 ** LEVELS."""
    blocks: tl.constexpr = SIZE // BLOCK
    outer = tl.arange(0, blocks)
    on_diagonal = outer[:, None, None, None] == outer[None, None, :, None]
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    rest = tl.sum(tl.where(on_diagonal, tl.reshape(a, (blocks, BLOCK, blocks, BLOCK)), 0.0), 2)
    x = tl.where(row == column, 1.0, 0.0) + tl.zeros((blocks, BLOCK, BLOCK), tl.float32)
    for step in range(BLOCK - 1):  # the rows up to this one are done
        done = tl.sum(tl.where(row == step, x, 0.0), 1)
        factors = tl.sum(tl.where(column == step, rest, 0.0), 2)
        x -= factors[:, :, None] * done[:, None, :]
    x = tl.reshape(tl.where(on_diagonal, x[:, :, None, :], 0.0), (SIZE, SIZE))
    for level in tl.static_range(LEVELS):
        x = _merge(a, x, SIZE, BLOCK * 2**level, PRECISION)
    return x
