"""Products of many rows with weights of eight bits or four on Hopper: a warp that only loads, and two or three warp
groups that each widen and multiply 64 rows of weights of their own, in Gluon.

One group widens in registers while another multiplies. All read the same rows of x, so that a multiprocessor takes less
from the L2 cache than with `scaled_kernel`, whose tiles have 64 rows of weights. K in plain order: the same bits.

Shape suffixes: M rows, K reduced size, N output columns, J bytes of a row of weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tercet.triton_kernels.matmul_hopper import tile_of
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.widen import in_order, widen_four

_ADD = gl.constexpr(1)
_GATE = gl.constexpr(2)
_OWN = gl.constexpr(64)
"""Rows of weights of a group."""
_AT_ONCE = gl.constexpr(64)
"""Columns of a group's sums, rows of x, that go out together: places of more would take too many registers."""


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
        wide = widen_four(numbers, scales[:, None], more[:, None], dtype, FOUR == 2, 1)
    else:
        wide = in_order((numbers.to(gl.float32) * scales[:, None]).to(dtype), 1)
    K: gl.constexpr = wide.shape[1]
    wide = gl.reshape(gl.permute(gl.reshape(wide, (4, 8, 2, K)), (0, 2, 1, 3)), (64, K))
    return gl.convert_layout(wide, OPERAND, assert_trivial=True)


@gluon.jit
def _fetch(w_desc, w_ring, full, stage, start_n, k, BYTES: gl.constexpr, FOUR: gl.constexpr):
    """Ask for a stage's weights from column k on, 64 rows for each group; BYTES will come with those of x."""
    STAGES: gl.constexpr = full.shape[0]
    GROUPS: gl.constexpr = w_ring.shape[0] // STAGES
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES)
    for group in gl.static_range(GROUPS):
        place = [start_n + group * _OWN, k // 2 if FOUR else k]
        tma.async_copy_global_to_shared(w_desc, place, bar, w_ring.index(stage * GROUPS + group))


@gluon.jit
def _load(
    x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, K: gl.constexpr, FOUR: gl.constexpr, PARTS: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: fill the ring, stage after stage, tile after tile; with the first weights ahead of the wait."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    WIDTH: gl.constexpr = w_ring.shape[0] // STAGES * _OWN
    BYTES: gl.constexpr = BLOCK_M * BLOCK_K * 2 + WIDTH * w_ring.shape[2]
    PART_K: gl.constexpr = K // PARTS
    ahead: gl.constexpr = STAGES if PART_K // BLOCK_K > STAGES else PART_K // BLOCK_K
    num_tiles = num_m * num_n * PARTS
    if gl.program_id(0) < num_tiles:
        _, tile_n = tile_of(gl.program_id(0), num_m, num_n * PARTS, GROUP_M)
        for stage in gl.static_range(ahead):
            k = tile_n % PARTS * PART_K + stage * BLOCK_K
            _fetch(w_desc, w_ring, full, stage, tile_n // PARTS * WIDTH, k, BYTES, FOUR)
    wait_for_previous(PDL)
    count = 0
    for tile in range(gl.program_id(0), num_tiles, NUM_PROGRAMS):
        tile_m, tile_n = tile_of(tile, num_m, num_n * PARTS, GROUP_M)
        start_k = tile_n % PARTS * PART_K
        for k in range(start_k, start_k + PART_K, BLOCK_K):
            stage = count % STAGES
            if count >= ahead:
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                _fetch(w_desc, w_ring, full, stage, tile_n // PARTS * WIDTH, k, BYTES, FOUR)
            tma.async_copy_global_to_shared(x_desc, [tile_m * BLOCK_M, k], full.index(stage), x_ring.index(stage))
            count += 1


@gluon.jit
def _halves(sums):
    """The left and the right half of [32, M], without a move."""
    ROWS: gl.constexpr = sums.shape[0]
    HALF: gl.constexpr = sums.shape[1] // 2
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _pairs_layout(HALF))
    left, right = gl.split(gl.permute(gl.reshape(sums, (ROWS, 2, HALF)), (0, 2, 1)))
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _store(
    even, odd, bias_ptr, out_ptr, start_n, start_m, M, N: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr
):
    """Finish a group's sums of its even and of its odd columns, and send them out."""
    SIZE: gl.constexpr = even.shape[1]
    if SIZE > _AT_ONCE:
        even, even_right = _halves(even)
        odd, odd_right = _halves(odd)
        _store(even, odd, bias_ptr, out_ptr, start_n, start_m, M, N, EPILOGUE, HAS_BIAS)
        _store(even_right, odd_right, bias_ptr, out_ptr, start_n, start_m + SIZE // 2, M, N, EPILOGUE, HAS_BIAS)
    else:
        PAIRS: gl.constexpr = _pairs_layout(SIZE)
        LAYOUT: gl.constexpr = gl.SliceLayout(2, PAIRS)
        pairs = start_n // 2 + gl.arange(0, _OWN // 2, gl.SliceLayout(1, LAYOUT))
        rows = start_m + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)).to(gl.int64)[None, :]
        if HAS_BIAS:
            even += gl.load(bias_ptr + 2 * pairs, mask=2 * pairs < N, other=0.0).to(gl.float32)[:, None]
            odd += gl.load(bias_ptr + 2 * pairs + 1, mask=2 * pairs + 1 < N, other=0.0).to(gl.float32)[:, None]
        if EPILOGUE == _GATE:
            y = even / (1.0 + gl.exp(-even)) * odd
            inside = (rows < M) & (pairs < N // 2)[:, None]
            gl.store(out_ptr + rows * (N // 2) + pairs[:, None], y.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            y = gl.convert_layout(gl.join(even, odd), PAIRS, assert_trivial=True)
            which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))[None, None, :]
            columns = gl.expand_dims(2 * pairs[:, None], 2) + which
            rows = gl.expand_dims(rows, 2)
            inside = (rows < M) & (columns < N)
            places = out_ptr + rows * N + columns
            if EPILOGUE == _ADD:
                y += gl.load(places, mask=inside, other=0.0).to(gl.float32)
            gl.store(places, y.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, FOUR: gl.constexpr, PARTS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warp group: its 64 output columns of each tile, from the ring to the store."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    GROUPS: gl.constexpr = w_ring.shape[0] // STAGES
    # The next weights are widened while a product runs, where there are registers for both.
    AHEAD: gl.constexpr = GROUPS == 2 and BLOCK_M * BLOCK_K <= 128 * 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    STORED: gl.constexpr = _bytes_layout(w_ring.shape[2])
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _pairs_layout(BLOCK_M))
    w_rows = gl.arange(0, _OWN, gl.SliceLayout(1, STORED))
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n * PARTS, NUM_PROGRAMS):
        tile_m, tile_n = tile_of(tile, num_m, num_n * PARTS, GROUP_M)
        start_n = (tile_n // PARTS * GROUPS + WHICH) * _OWN
        part = tile_n % PARTS
        first_k = part * (K // PARTS)
        scale_ptrs = scales_ptr + gl.minimum(start_n + w_rows, N - 1)
        scales, more = _load_scales(scale_ptrs, first_k, N, GROUP, FOUR)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        w = _widen(w_ring.index(stage * GROUPS + WHICH).load(STORED), scales, more, x_ring.dtype, FOUR, OPERAND)
        acc = gl.zeros((_OWN, BLOCK_M), gl.float32, SUMS)
        for k in range(first_k + BLOCK_K, first_k + K // PARTS, BLOCK_K):
            scales, more = _load_scales(scale_ptrs, k, N, GROUP, FOUR)
            acc = warpgroup_mma(w, x_ring.index(stage).permute((1, 0)), acc, is_async=True)
            if not AHEAD:
                acc, w = warpgroup_mma_wait(0, deps=[acc, w])
                mbarrier.arrive(free.index(stage))
            count += 1
            next_stage = count % STAGES
            mbarrier.wait(full.index(next_stage), count // STAGES & 1)
            numbers = w_ring.index(next_stage * GROUPS + WHICH).load(STORED)
            next_w = _widen(numbers, scales, more, x_ring.dtype, FOUR, OPERAND)
            if AHEAD:
                acc, w = warpgroup_mma_wait(0, deps=[acc, w])
                mbarrier.arrive(free.index(stage))
            w = next_w
            stage = next_stage
        acc = warpgroup_mma(w, x_ring.index(stage).permute((1, 0)), acc, is_async=True)
        acc, w = warpgroup_mma_wait(0, deps=[acc, w])
        mbarrier.arrive(free.index(stage))
        count += 1
        even, odd = gl.split(
            gl.reshape(gl.permute(gl.reshape(acc, (4, 2, 8, BLOCK_M)), (0, 2, 3, 1)), (32, BLOCK_M, 2))
        )
        even = gl.convert_layout(even, LAYOUT, assert_trivial=True)
        odd = gl.convert_layout(odd, LAYOUT, assert_trivial=True)
        wait_for_previous(PDL)
        of_part = out_ptr + part.to(gl.int64) * M * N if PARTS > 1 else out_ptr
        _store(even, odd, bias_ptr, of_part, start_n, tile_m * BLOCK_M, M, N, EPILOGUE, HAS_BIAS)


@gluon.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def groups_kernel(
    x_desc, w_desc, scales_ptr, bias_ptr, out_ptr, rows_ptr, M, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    FOUR: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ROWS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor walks over output tiles of GROUPS times 64 columns, with PARTS
    over sums of parts of K, in an output of each part's own.

    GROUP columns share a scale; what `w_desc` has in a block divides it, or 64 with FOUR, where halves have their own.
    """
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    rows = M
    if HAS_ROWS:  # how many there are in truth
        rows = gl.minimum(M, gl.load(rows_ptr))
    num_m = gl.cdiv(rows, BLOCK_M)
    num_n: gl.constexpr = (N + GROUPS * _OWN - 1) // (GROUPS * _OWN)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUPS, _OWN, w_desc.block_shape[1]], w_desc.layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=GROUPS)
        mbarrier.init(full.index(stage), count=1)
    let_next_start(PDL)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    two: gl.constexpr = 2
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (x_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP, FOUR,
                     PARTS, GROUP_M, NUM_PROGRAMS, EPILOGUE, HAS_BIAS, PDL, zero),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP, FOUR,
                     PARTS, GROUP_M, NUM_PROGRAMS, EPILOGUE, HAS_BIAS, PDL, one),
                ),
                (
                    _load,
                    (x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, K, FOUR, PARTS, GROUP_M, NUM_PROGRAMS,
                     PDL),
                ),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (x_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP, FOUR,
                     PARTS, GROUP_M, NUM_PROGRAMS, EPILOGUE, HAS_BIAS, PDL, zero),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP, FOUR,
                     PARTS, GROUP_M, NUM_PROGRAMS, EPILOGUE, HAS_BIAS, PDL, one),
                ),
                (
                    _multiply,
                    (x_ring, w_ring, free, full, scales_ptr, bias_ptr, out_ptr, M, num_m, num_n, N, K, GROUP, FOUR,
                     PARTS, GROUP_M, NUM_PROGRAMS, EPILOGUE, HAS_BIAS, PDL, two),
                ),
                (
                    _load,
                    (x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, K, FOUR, PARTS, GROUP_M, NUM_PROGRAMS,
                     PDL),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
