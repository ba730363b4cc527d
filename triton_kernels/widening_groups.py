"""Warp groups that each widen and multiply 64 rows of their own of weights of eight bits or four, on Hopper, in Gluon:
what their kernels share.

One group widens in registers while another multiplies. All read the same rows of x, so that a multiprocessor takes less
from the L2 cache than with `scaled_kernel`, whose tiles have 64 rows of weights. K in plain order: the same bits.

Shape suffixes: M rows of x, K reduced size, N output columns, J bytes of a row of weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tercet.triton_kernels.clamped_gate import gated_by
from tercet.triton_kernels.matmul_epilogue import ADD, is_gate
from tercet.triton_kernels.widen import in_order, widen_four
from tercet.triton_kernels.widen_mx import mx_powers

OWN = gl.constexpr(64)
"""Rows of weights of a group."""
_AT_ONCE = gl.constexpr(64)
"""Rows of x whose sums go out together: places of more would take too many registers."""


@gluon.constexpr_function
def _bytes_layout(J):
    """A group's bytes: 16 with a thread, in rows of the matrix units' operand when they are in order and in pairs."""
    blocks = [[0, 64 << i] for i in range((J // 64).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], *blocks]
    return gl.DistributedLinearLayout(
        registers, [[0, 16], [0, 32], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0]], [], [64, J]
    )


@gluon.constexpr_function
def _pairs_layout(M):
    """A group's sums as pairs of output columns, [32, M, 2], with the threads that have them."""
    more = [[0, 8 << i, 0] for i in range((M // 8).bit_length() - 1)]
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 1, 0], *more], lanes, [[8, 0, 0], [16, 0, 0]], [], [32, M, 2])


@gluon.jit
def _load_scales(scale_ptrs, k, N: gl.constexpr, GROUP: gl.constexpr, FOUR: gl.constexpr):
    """Of a block from column k on: for FP8 one a row, for FOUR bits one for each half."""
    scales = gl.load(scale_ptrs + k // GROUP * N)
    more = scales
    if FOUR and GROUP % 128:
        more = gl.load(scale_ptrs + (k + 64) // GROUP * N)
    return scales, more


@gluon.jit
def _widen(numbers, scales, more, dtype: gl.constexpr, FOUR: gl.constexpr, OPERAND: gl.constexpr):
    """Rows 2 i and 2 i + 1 of each 16 go to rows i and i + 8: their sums, two output columns, will be one thread's."""
    if FOUR:
        words, more_words = scales[:, None], more[:, None]
        if FOUR == 3:  # half of the word for each eight bytes
            columns = gl.arange(0, numbers.shape[1], gl.SliceLayout(0, numbers.type.layout))
            half = words >> ((columns >> 3 & 1) << 4)[None, :]
            words, more_words = mx_powers(half), mx_powers(half >> 8)
        wide = widen_four(numbers, words, more_words, dtype, FOUR, 1)
    else:
        wide = in_order((numbers.to(gl.float32) * scales[:, None]).to(dtype), 1)
    K: gl.constexpr = wide.shape[1]
    wide = gl.reshape(gl.permute(gl.reshape(wide, (4, 8, 2, K)), (0, 2, 1, 3)), (64, K))
    return gl.convert_layout(wide, OPERAND, assert_trivial=True)


@gluon.jit
def own_rows(w_ring):
    """Of a group's 64 rows of weights those that a thread widens."""
    return gl.arange(0, OWN, gl.SliceLayout(1, _bytes_layout(w_ring.shape[2])))


@gluon.jit
def _start(x_ring, tail_ring, stage, w, acc, tail, TALL: gl.constexpr):
    """Begin to multiply a stage's rows with `w`: those of a TALL tile's tail read the same registers."""
    acc = warpgroup_mma(w, x_ring.index(stage).permute((1, 0)), acc, is_async=True)
    if TALL:
        of_tail = gl.convert_layout(w, gl.DotOperandLayout(0, tail.type.layout, 2), assert_trivial=True)
        tail = warpgroup_mma(of_tail, tail_ring.index(stage).permute((1, 0)), tail, is_async=True)
    return acc, tail


@gluon.jit
def _await(acc, tail, w, TALL: gl.constexpr):
    """The sums of products that have ended: until here the registers of `w` are theirs."""
    if TALL:
        acc, tail, w = warpgroup_mma_wait(0, deps=[acc, tail, w])
    else:
        acc, w = warpgroup_mma_wait(0, deps=[acc, w])
    return acc, tail


@gluon.jit
def multiply_stages(
    x_ring, tail_ring, w_ring, free, full, count, scale_ptrs, first_k, SIZE: gl.constexpr, ROWS: gl.constexpr,
    GROUP: gl.constexpr, FOUR: gl.constexpr, TALL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warp group's sums of a tile over SIZE columns, from the ring: [64, M], the same with the rows of its tail if
    it is TALL, and how many stages it has seen by now. ROWS: from the scales of one group of columns to the next."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    GROUPS: gl.constexpr = w_ring.shape[0] // STAGES
    # The next weights are widened while a product runs, where there are registers for both.
    AHEAD: gl.constexpr = GROUPS == 2 and BLOCK_M * BLOCK_K <= 128 * 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    STORED: gl.constexpr = _bytes_layout(w_ring.shape[2])
    scales, more = _load_scales(scale_ptrs, first_k, ROWS, GROUP, FOUR)
    stage = count % STAGES
    mbarrier.wait(full.index(stage), count // STAGES & 1)
    w = _widen(w_ring.index(stage * GROUPS + WHICH).load(STORED), scales, more, x_ring.dtype, FOUR, OPERAND)
    acc = gl.zeros((OWN, BLOCK_M), gl.float32, SUMS)
    tail = acc
    if TALL:
        TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M // 2, 16])
        tail = gl.zeros((OWN, BLOCK_M // 2), gl.float32, TAIL)
    for k in range(first_k + BLOCK_K, first_k + SIZE, BLOCK_K):
        scales, more = _load_scales(scale_ptrs, k, ROWS, GROUP, FOUR)
        acc, tail = _start(x_ring, tail_ring, stage, w, acc, tail, TALL)
        if not AHEAD:
            acc, tail = _await(acc, tail, w, TALL)
            mbarrier.arrive(free.index(stage))
        count += 1
        next_stage = count % STAGES
        mbarrier.wait(full.index(next_stage), count // STAGES & 1)
        numbers = w_ring.index(next_stage * GROUPS + WHICH).load(STORED)
        next_w = _widen(numbers, scales, more, x_ring.dtype, FOUR, OPERAND)
        if AHEAD:
            acc, tail = _await(acc, tail, w, TALL)
            mbarrier.arrive(free.index(stage))
        w = next_w
        stage = next_stage
    acc, tail = _start(x_ring, tail_ring, stage, w, acc, tail, TALL)
    acc, tail = _await(acc, tail, w, TALL)
    mbarrier.arrive(free.index(stage))
    return acc, tail, count + 1


@gluon.jit
def _in_pairs(acc):
    """A group's sums of even output columns and of odd ones, [32, M] each, without a move."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _pairs_layout(BLOCK_M))
    by_pairs = gl.permute(gl.reshape(acc, (4, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    even, odd = gl.split(gl.reshape(by_pairs, (32, BLOCK_M, 2)))
    return gl.convert_layout(even, LAYOUT, assert_trivial=True), gl.convert_layout(odd, LAYOUT, assert_trivial=True)


@gluon.jit
def _halves(sums):
    """The left and the right half of [32, M], without a move."""
    ROWS: gl.constexpr = sums.shape[0]
    HALF: gl.constexpr = sums.shape[1] // 2
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _pairs_layout(HALF))
    left, right = gl.split(gl.permute(gl.reshape(sums, (ROWS, 2, HALF)), (0, 2, 1)))
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _store_pairs(
    even, odd, bias_ptr, limit, slope, pairs_ptr, out_ptr, start_n, start_m, M, N: gl.constexpr,
    EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, DEALT: gl.constexpr,
):  # fmt: skip
    """The same with sums of even columns and of odd ones."""
    SIZE: gl.constexpr = even.shape[1]
    if SIZE > _AT_ONCE:
        even, even_right = _halves(even)
        odd, odd_right = _halves(odd)
        _store_pairs(
            even, odd, bias_ptr, limit, slope, pairs_ptr, out_ptr, start_n, start_m, M, N, EPILOGUE, HAS_BIAS, DEALT
        )
        start_m += SIZE // 2
        _store_pairs(
            even_right, odd_right, bias_ptr, limit, slope, pairs_ptr, out_ptr, start_n, start_m, M, N, EPILOGUE,
            HAS_BIAS, DEALT,
        )  # fmt: skip
    else:
        PAIRS: gl.constexpr = _pairs_layout(SIZE)
        LAYOUT: gl.constexpr = gl.SliceLayout(2, PAIRS)
        columns = start_n + 2 * gl.arange(0, OWN // 2, gl.SliceLayout(1, LAYOUT))
        rows = start_m + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
        there = rows < M
        if DEALT:
            rows = gl.load(pairs_ptr + rows)
            there = rows >= 0
        rows = rows.to(gl.int64)[None, :]
        if HAS_BIAS:
            even += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
            odd += gl.load(bias_ptr + columns + 1, mask=columns + 1 < N, other=0.0).to(gl.float32)[:, None]
        if is_gate(EPILOGUE):
            y = gated_by(even, odd, limit, slope, EPILOGUE)
            places = out_ptr + rows * (N // 2) + (columns // 2)[:, None]
            gl.store(places, y.to(out_ptr.dtype.element_ty), mask=there[None, :] & (columns < N)[:, None])
        else:
            y = gl.convert_layout(gl.join(even, odd), PAIRS, assert_trivial=True)
            which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))[None, None, :]
            both = gl.expand_dims(columns[:, None], 2) + which
            inside = gl.expand_dims(there[None, :], 2) & (both < N)
            places = out_ptr + gl.expand_dims(rows, 2) * N + both
            if EPILOGUE == ADD:
                y += gl.load(places, mask=inside, other=0.0).to(gl.float32)
            gl.store(places, y.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_sums(
    acc, bias_ptr, limit, slope, pairs_ptr, out_ptr, start_n, start_m, M, N: gl.constexpr, EPILOGUE: gl.constexpr,
    HAS_BIAS: gl.constexpr, DEALT: gl.constexpr,
):  # fmt: skip
    """Finish a group's sums and send them out: to rows up to M, or DEALT to those that are in its places, where
    somebody is."""
    even, odd = _in_pairs(acc)
    _store_pairs(
        even, odd, bias_ptr, limit, slope, pairs_ptr, out_ptr, start_n, start_m, M, N, EPILOGUE, HAS_BIAS, DEALT
    )
