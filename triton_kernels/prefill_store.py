"""What prefill attention on Hopper writes: a tile's rows, sums over a part of its keys, and zeros for padding.

Shape suffixes: H q heads, D head size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.prefill_load import RECORD, start_next


@gluon.constexpr_function
def lines_of(D):
    """Rows of D numbers by a warp group, eight numbers a thread: 16 bytes of those of 16 bits."""
    return gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])


@gluon.jit
def store_rows(acc, weight, staging, out_ptr, first, num_queries, head, H: gl.constexpr, D: gl.constexpr):
    """Rows of sums, each divided by its weight. They go through shared memory: by products' registers a row would go
    out four bytes at a time, in lines it goes out sixteen."""
    LINES: gl.constexpr = lines_of(D)
    inverse = gl.convert_layout(1.0 / weight, gl.SliceLayout(1, acc.type.layout))
    staging.store((acc * inverse[:, None]).to(staging.dtype))
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, LINES))
    columns = gl.arange(0, D, gl.SliceLayout(0, LINES))
    out_ptrs = out_ptr + ((first + rows).to(gl.int64) * H + head)[:, None] * D + columns[None, :]
    gl.store(out_ptrs, staging.load(LINES), mask=(rows < num_queries)[:, None] & (columns < D)[None, :])


@gluon.jit
def store_part(acc, largest, weight, partial_ptr, stats_ptr, first, head, H: gl.constexpr, D: gl.constexpr):
    """Sums over a part of the keys as they are, each row's largest score and its weight."""
    layout: gl.constexpr = acc.type.layout
    rows = (first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))).to(gl.int64) * H + head
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(partial_ptr + rows[:, None] * D + columns[None, :], acc)
    gl.store(stats_ptr + rows * 2, gl.convert_layout(largest, rows.type.layout))
    gl.store(stats_ptr + rows * 2 + 1, gl.convert_layout(weight, rows.type.layout))


@gluon.jit
def _clear_padding(
    tiles_ptr, out_ptr, begin, end, H: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Zeros for tokens of no chunk, so that nothing unheard of goes on to the next layer."""
    LAYOUT: gl.constexpr = lines_of(D)
    rows = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros((BLOCK_Q, D), dtype, LAYOUT)
    for pair in range(begin + gl.program_id(0), end, NUM_PROGRAMS):
        record_ptr = tiles_ptr + pair // H * RECORD
        tokens = (gl.load(record_ptr) + rows).to(gl.int64)
        inside = (rows < gl.load(record_ptr + 1))[:, None] & (columns < D)[None, :]
        gl.store(out_ptr + (tokens * H + pair % H)[:, None] * D + columns[None, :], zeros, mask=inside)


@gluon.jit
def begin_step(
    tiles_ptr, out_ptr, N, H: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Wait for the kernel ahead, and leave zeros for padding; returns how many pairs of a tile and `HEADS` heads."""
    start_next(PDL)
    num_tiles = gl.load(tiles_ptr + N * RECORD)
    padded = gl.load(tiles_ptr + N * RECORD + 1)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    _clear_padding(tiles_ptr, out_ptr, num_tiles * H, padded * H, H, D, BLOCK_Q, NUM_PROGRAMS, dtype)
    return num_tiles * (H // HEADS)
