"""How a finished fp32 tile of any product kernel reaches memory.

Shape suffixes: M rows, N output columns (before the gate halves them).
"""

import triton
import triton.language as tl

STORE = tl.constexpr(0)
ADD = tl.constexpr(1)  # into what the output holds: the residual
GATE = tl.constexpr(2)  # silu(even columns) * odd columns


@triton.jit
def gate_pairs(acc_MN, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up of columns in turns: [BLOCK_M, BLOCK_N] -> [BLOCK_M, BLOCK_N / 2]."""
    gate, up = tl.split(tl.reshape(acc_MN, (BLOCK_M, BLOCK_N // 2, 2)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def finish_tile(
    acc_MN, rows, start_n, bias_ptr, out_ptr, M,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Bias, gate or residual, rounding once, and the store of what lies inside the output."""
    if HAS_BIAS:
        columns = start_n + tl.arange(0, BLOCK_N)
        acc_MN += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    width: tl.constexpr = N // 2 if EPILOGUE == GATE else N
    if EPILOGUE == GATE:
        y = gate_pairs(acc_MN, BLOCK_M, BLOCK_N)
        columns = start_n // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        y = acc_MN
        columns = start_n + tl.arange(0, BLOCK_N)
    pointers = out_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = (rows < M)[:, None] & (columns < width)[None, :]
    if EPILOGUE == ADD:
        y += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=mask)
