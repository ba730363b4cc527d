"""Products for up to 16 rows on Hopper whose weights are on the chip before the rows are there, in Gluon.

A program asks for all its weights at once, by TMA, before it waits for the kernel ahead; with HOLD they are in
registers by then. Behind the wait are one trip to the L2 cache for the rows, a few products, one exchange between the
warps, which share K, and the store. K is cut into chunks that go round the warps, whose sums are added in a fixed order
that is not that of other kernels: not for deterministic mode.

Weights are the tall side of the products and rows the narrow one. The matrix units may take the numbers of a chunk in
any order that both sides agree on: each lane takes 8 in a row, so that rows come by loads of 16 bytes straight to where
they are multiplied.

Shape suffixes: S warps, each with sums of its own, N output columns, K of one chunk, M rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tercet.triton_kernels.matmul_epilogue import ADD, GATE, gated
from tercet.triton_kernels.overlap import let_next_start, let_next_start_late
from tercet.triton_kernels.to_fp32 import to_fp32


@gluon.jit
def _wait_for_previous():
    """In a loop that turns once, which the assembler cannot know: so it leaves ahead of it what `_settle` put there."""
    gl.inline_asm_elementwise(
        "{ .reg .pred again; .reg .b32 zero; mov.u32 zero, %ctaid.y; HERE: griddepcontrol.wait; "
        "setp.ne.u32 again, zero, 0; @again bra HERE; } mov.u32 $0, 0;", "=r", [], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _settle(w):
    """The same numbers, in registers where the matrix units want them: by an operation that the assembler cannot undo.

    It would bring them there, and multiply them, one by one when rows are there and products wait.
    """
    settle: gl.constexpr = "{ .reg .b32 zero; mov.u32 zero, %ctaid.y; xor.b32 $0, $1, zero; }"
    return gl.inline_asm_elementwise(settle, "=r,r", [w], w.dtype, False, 2)


@gluon.jit
def _nothing():
    return ()


@gluon.jit
def _fetch(w_desc, blocks, full, chunk, start_n, TILES: gl.constexpr):
    """Ask for all weights of a program: STEPS times CHUNKS of K, of TILES blocks of columns."""
    CHUNKS: gl.constexpr = w_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[1]
    STEPS: gl.constexpr = blocks.shape[0] // TILES
    BARRIERS: gl.constexpr = full.shape[0]
    for barrier in gl.static_range(BARRIERS):
        mbarrier.init(full.index(barrier), count=1)
    for barrier in gl.static_range(BARRIERS):
        mbarrier.expect(full.index(barrier), STEPS // BARRIERS * TILES * CHUNKS * BLOCK_N * w_desc.block_shape[2] * 2)
        for step in gl.static_range(barrier, STEPS, BARRIERS):
            for tile in gl.static_range(TILES):
                place = [chunk + step * CHUNKS, start_n + tile * BLOCK_N, 0]
                tma.async_copy_global_to_shared(w_desc, place, full.index(barrier), blocks.index(step * TILES + tile))


@gluon.jit
def _places(CHUNKS: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the numbers of a step's chunks are in a row: [CHUNKS, K]."""
    chunks = gl.arange(0, CHUNKS, gl.SliceLayout(1, LAYOUT))
    return (chunks * BLOCK_K)[:, None] + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _times(w, norm):
    """Weights times the norm's, rounded: rows need no more than their inverse RMS afterwards."""
    norm, w = gl.broadcast(norm, w)
    if w.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [w, norm], w.dtype, True, 2)
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [w, norm], w.dtype, True, 2)


@gluon.jit
def _squares(x, WARPS: gl.constexpr):
    """The squares of a step's numbers, added up over each warp's chunks: [S, K, M]."""
    wide = gl.reshape(to_fp32(x), (x.shape[0] // WARPS, WARPS, x.shape[1], x.shape[2]))
    return gl.sum(wide * wide, 0)


@gluon.jit
def _store_gated(y_NM, out_ptr, start_n, M, N: gl.constexpr, WARPS: gl.constexpr):
    """silu(even columns) * odd columns."""
    BLOCK_N: gl.constexpr = y_NM.shape[0]
    BLOCK_M: gl.constexpr = y_NM.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    gate, up = gl.split(gl.reshape(gl.permute(y_NM, (1, 0)), (BLOCK_M, BLOCK_N // 2, 2)))
    y = gl.convert_layout(gated(gate, up), LAYOUT)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    n = start_n // 2 + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(0, LAYOUT))
    places = m[:, None] * (N // 2) + n[None, :]
    gl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None])


@gluon.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def early_kernel(
    x_ptr, norm_ptr, eps, w_desc, bias_ptr, out_ptr, M, N: gl.constexpr, K: gl.constexpr,
    BLOCK_M: gl.constexpr, TILES: gl.constexpr, PARTS: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    NORM: gl.constexpr, HOLD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (N / (TILES * BLOCK_N) * PARTS,): one program owns TILES * BLOCK_N outputs of all rows, or with PARTS the
    sum of its part of K, in an output of its part's own.

    `w_desc`: weights as [K / BLOCK_K, N, BLOCK_K] in blocks of [CHUNKS, BLOCK_N, BLOCK_K], for one step each.
    """
    let_next_start(PDL)
    WARPS: gl.constexpr = gl.num_warps()
    CHUNKS: gl.constexpr = w_desc.block_shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_shape[1]
    BLOCK_K: gl.constexpr = w_desc.block_shape[2]
    STEPS: gl.constexpr = K // PARTS // (CHUNKS * BLOCK_K)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    W_SIDE: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    X_SIDE: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    OUT: gl.constexpr = gl.BlockedLayout([WARPS, 2, 1], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    part = gl.program_id(0) % PARTS
    start_n = gl.program_id(0) // PARTS * (TILES * BLOCK_N)
    blocks = gl.allocate_shared_memory(w_desc.dtype, [STEPS * TILES, CHUNKS, BLOCK_N, BLOCK_K], w_desc.layout)
    # Without HOLD a step's products begin when its own weights are there.
    full = gl.allocate_shared_memory(gl.int64, [1 if HOLD else STEPS, 1], mbarrier.MBarrierLayout())
    _fetch(w_desc, blocks, full, part * (STEPS * CHUNKS), start_n, TILES)

    # The last row in place of those that are not there: of few rows a remainder, as in matmul_skinny.py, costs more.
    rows = gl.minimum(gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, X_SIDE))), M - 1)
    places = _places(CHUNKS, BLOCK_K, gl.SliceLayout(2, X_SIDE))[:, :, None]
    x_ptrs = x_ptr + part * (K // PARTS) + rows[None, None, :] * K + places
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(0, OUT)))
    n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, OUT)))
    places_NM = m[None, :] * N + n[:, None]
    out_ptr += part * M * N
    norm, bias, w = _nothing(), _nothing(), _nothing()
    for step in gl.static_range(STEPS if NORM else 0):
        norm_ptrs = norm_ptr + step * (CHUNKS * BLOCK_K) + _places(CHUNKS, BLOCK_K, gl.SliceLayout(1, W_SIDE))
        norm += (gl.load(norm_ptrs)[:, None, :],)
    for tile in gl.static_range(TILES if HAS_BIAS else 0):
        bias += (gl.load(bias_ptr + tile * BLOCK_N + n),)
    if HOLD:
        mbarrier.wait(full.index(0), 0)
        for index in gl.static_range(STEPS * TILES):
            block = blocks.index(index).load(W_SIDE)
            w += (_settle(_times(block, norm[index // TILES]) if NORM else block),)

    _wait_for_previous()
    let_next_start_late(PDL)
    x, residual, sums = _nothing(), _nothing(), _nothing()
    for step in gl.static_range(STEPS):
        x += (gl.load(x_ptrs + step * (CHUNKS * BLOCK_K)),)
    for tile in gl.static_range(TILES if EPILOGUE == ADD else 0):
        residual += (gl.load(out_ptr + tile * BLOCK_N + places_NM, mask=(m < M)[None, :], other=0.0),)
    if HOLD:
        # The assembler moves no load over this, which waits for nothing. Else it would ask for some numbers, multiply
        # them and then ask for more: one trip to the L2 cache behind the other.
        mbarrier.wait(full.index(0), 0)
    if NORM:
        squares = _squares(x[0], WARPS)
        for step in gl.static_range(1, STEPS):
            squares += _squares(x[step], WARPS)
        norms = gl.allocate_shared_memory(
            gl.float32, [WARPS, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), gl.sum(squares, 1)
        )
    for tile in gl.static_range(TILES):
        acc = gl.zeros((CHUNKS, BLOCK_N, BLOCK_M), gl.float32, MMA)
        for step in gl.static_range(STEPS):
            if HOLD:
                acc = mma_v2(w[step * TILES + tile], x[step], acc)
            else:
                if tile == 0:
                    mbarrier.wait(full.index(step), 0)
                block = blocks.index(step * TILES + tile).load(W_SIDE)
                acc = mma_v2(_times(block, norm[step]) if NORM else block, x[step], acc)
        # Each warp adds its own chunks first.
        acc_SNM = gl.sum(gl.reshape(acc, (CHUNKS // WARPS, WARPS, BLOCK_N, BLOCK_M)), 0)
        sums += (gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_N, BLOCK_M], PLAIN, acc_SNM),)
    if NORM:
        mean = gl.convert_layout(gl.sum(norms.load(gl.SliceLayout(1, OUT)), 0) / K, m.type.layout)
        scale = gl.rsqrt(mean + eps)
    for tile in gl.static_range(TILES):
        y_NM = gl.sum(sums[tile].load(OUT), 0)
        if NORM:
            y_NM *= scale[None, :]
        if HAS_BIAS:
            y_NM += bias[tile].to(gl.float32)[:, None]
        if EPILOGUE == ADD:
            y_NM += residual[tile].to(gl.float32)
        if EPILOGUE == GATE:
            _store_gated(y_NM, out_ptr, start_n + tile * BLOCK_N, M, N, WARPS)
        else:
            y_NM = y_NM.to(out_ptr.dtype.element_ty)
            gl.store(out_ptr + tile * BLOCK_N + places_NM, y_NM, mask=(m < M)[None, :])
    # Nothing else may lie where they are: else all warps wait for each other before they write their sums.
    blocks._keep_alive()
    full._keep_alive()
