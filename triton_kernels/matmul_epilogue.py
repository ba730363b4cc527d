"""How a finished fp32 tile of any product kernel reaches memory.

What a tile meets at its end can be on its way long before: the bias before the wait for the kernel ahead, the residual
after it. Few rows wait for one answer of the L2 cache less; many rows load both at the end and keep their registers.

Shape suffixes: M rows, N output columns (before the gate halves them).
"""

import triton
import triton.language as tl

from tercet.triton_kernels.matmul_draw import draw_tile, load_rows

STORE = tl.constexpr(0)
ADD = tl.constexpr(1)  # into what the output holds: the residual
GATE = tl.constexpr(2)  # silu(even columns) * odd columns
SAMPLE = tl.constexpr(3)  # the columns are logits: nothing but each row's best score of the tile
SQUARED = tl.constexpr(5)  # of experts without gates: ReLU, squared (relu_squared.py)
CLAMPED = tl.constexpr(4)  # experts' gates, within limits (clamped_gate.py)
GELU = tl.constexpr(6)  # experts' gates: gelu(even columns), approximated by tanh, * odd columns


@triton.constexpr_function
def is_gate(epilogue):
    """Whether columns are gate and up in turns, which make one number together."""
    return epilogue in (GATE.value, CLAMPED.value, GELU.value)


@triton.jit
def gated(gate, up):
    """silu(gate) * up, in fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gate_pairs(acc_MN, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up of columns in turns: [BLOCK_M, BLOCK_N] -> [BLOCK_M, BLOCK_N / 2]."""
    gate, up = tl.split(tl.reshape(acc_MN, (BLOCK_M, BLOCK_N // 2, 2)))
    return gated(gate, up)


@triton.jit
def load_bias(bias_ptr, start_n, N: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The bias of a tile, 0 without one."""
    columns = start_n + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        return tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    return tl.zeros((BLOCK_N,), tl.float32)


@triton.jit
def load_residual(
    out_ptr, rows, start_n, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr
):
    """What a tile is added to, 0 where it is not."""
    columns = start_n + tl.arange(0, BLOCK_N)
    if EPILOGUE == ADD:
        pointers = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        return tl.load(pointers, mask=(rows < M)[:, None] & (columns < N)[None, :], other=0.0)
    return tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)


@triton.jit
def begin_draw(draw, rows, M, EPILOGUE: tl.constexpr):
    """What a tile of logits needs to know of its rows; of no use elsewhere."""
    facts = rows
    if EPILOGUE == SAMPLE:
        facts = load_rows(draw, rows, M)
    return facts


@triton.jit
def turn_ring(draw, EPILOGUE: tl.constexpr):
    """The first program of a product that draws moves the ring on, after its wait: others read it until then."""
    if EPILOGUE == SAMPLE and tl.program_id(0) == 0:
        tl.store(draw.turn, (tl.load(draw.turn) + 1) % draw.depth)


@triton.jit
def finish_with(
    acc_MN, bias_N, residual_MN, facts, rows, start_n, tile, out_ptr, draw, M,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Bias, gate or residual, rounding once, and the store of what lies inside the output; or the draw.

    `facts`: what `begin_draw` said. `tile`: which of the row's tiles this is.
    """
    acc_MN += bias_N[None, :]
    if EPILOGUE == SAMPLE:
        draw_tile(acc_MN, facts, rows, start_n, tile, draw, M, BLOCK_N, out_ptr.dtype.element_ty)
    else:
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
            y += residual_MN.to(tl.float32)
        tl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_tile(
    acc_MN, facts, rows, start_n, tile, bias_ptr, out_ptr, draw, M,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The same, with bias and residual loaded here."""
    bias_N = load_bias(bias_ptr, start_n, N, BLOCK_N, HAS_BIAS)
    residual_MN = load_residual(out_ptr, rows, start_n, M, N, BLOCK_M, BLOCK_N, EPILOGUE)
    finish_with(
        acc_MN, bias_N, residual_MN, facts, rows, start_n, tile, out_ptr, draw, M, N, BLOCK_M, BLOCK_N, EPILOGUE
    )
