"""Products of many tokens with their experts' weights of eight bits or four on Hopper: warps that only load, which
gather rows where they lie, and three warp groups that widen and multiply (`widening_groups.py`), in Gluon.

Shape suffixes: M rows of x, K reduced size, N output columns of one expert.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.widening_groups import GATE, OWN, fetch_weights, multiply_stages, own_rows, store_sums

_GROUPS = gl.constexpr(3)
_LATE = gl.constexpr(2)
"""Stages of rows that are on their way while the loading warps ask for more."""


@gluon.constexpr_function
def _rows_layout(K):
    """A thread brings 16 bytes of a row, and neighbours the next ones."""
    return gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])


@gluon.jit
def _gather(
    x_ptr, w_desc, pairs_ptr, tile_experts_ptr, x_ring, w_ring, free, full, num_tiles, PER_ROW: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, FOUR: gl.constexpr, NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warps: fill the ring, stage after stage, tile after tile. Weights come by the copy engine, rows by
    the warps themselves, which say that a stage of them is there when _LATE more are on their way."""
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    WIDTH: gl.constexpr = _GROUPS * OWN
    LAYOUT: gl.constexpr = _rows_layout(BLOCK_K)
    num_n: gl.constexpr = (N + WIDTH - 1) // WIDTH
    places = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    wait_for_previous(PDL)
    count = 0
    for index in range(gl.program_id(0), num_tiles * num_n, NUM_PROGRAMS):
        tile = index // num_n
        expert = gl.load(tile_experts_ptr + tile)
        if expert >= 0:
            start_n = expert * N + index % num_n * WIDTH
            rows = gl.maximum(gl.load(pairs_ptr + tile * BLOCK_M + places), 0) // PER_ROW
            x_ptrs = x_ptr + rows.to(gl.int64)[:, None] * K + columns[None, :]
            for k in range(0, K, BLOCK_K):
                stage = count % STAGES
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                fetch_weights(w_desc, w_ring, full, stage, start_n, k, WIDTH * w_ring.shape[2], FOUR)
                async_copy.async_copy_global_to_shared(x_ring.index(stage), x_ptrs + k)
                async_copy.commit_group()
                if count >= _LATE:
                    async_copy.wait_group(_LATE)
                    fence_async_shared()
                    mbarrier.arrive(full.index((count - _LATE) % STAGES))
                count += 1
    async_copy.wait_group(0)
    fence_async_shared()
    for late in gl.static_range(_LATE):
        mbarrier.arrive(full.index((count + STAGES - _LATE + late) % STAGES), pred=count >= _LATE - late)


@gluon.jit
def _multiply(
    x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, out_ptr, num_tiles, N: gl.constexpr,
    K: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, FOUR: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    EPILOGUE: gl.constexpr, PDL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warp group: its 64 output columns of each tile, from the first product to the store."""
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    num_n: gl.constexpr = (N + _GROUPS * OWN - 1) // (_GROUPS * OWN)
    wait_for_previous(PDL)
    count = 0
    for index in range(gl.program_id(0), num_tiles * num_n, NUM_PROGRAMS):
        tile = index // num_n
        expert = gl.load(tile_experts_ptr + tile)
        if expert >= 0:
            start_n = (index % num_n * _GROUPS + WHICH) * OWN
            scale_ptrs = scales_ptr + expert * N + gl.minimum(start_n + own_rows(w_ring), N - 1)
            even, odd, count = multiply_stages(
                x_ring, w_ring, free, full, count, scale_ptrs, 0, K, ROWS, GROUP, FOUR, WHICH
            )
            store_sums(even, odd, None, pairs_ptr, out_ptr, start_n, tile * BLOCK_M, 0, N, EPILOGUE, False, True)


@gluon.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["num_tiles"])
def experts_groups_kernel(
    x_ptr, w_desc, scales_ptr, pairs_ptr, tile_experts_ptr, out_ptr, num_tiles, PER_ROW: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, FOUR: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr, GATED: gl.constexpr, X_LAYOUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor walks over output tiles, of BLOCK_M places by three times 64
    columns, those of an expert that are there.

    ROWS: of all experts' weights. GROUP columns share a scale; what `w_desc` has in a block divides it, or 64 with
    FOUR, where halves have their own. It divides K, too.
    """
    BLOCK_K: gl.constexpr = w_desc.block_shape[1] * (2 if FOUR else 1)
    EPILOGUE: gl.constexpr = GATE if GATED else 0
    x_ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], X_LAYOUT)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * _GROUPS, OWN, w_desc.block_shape[1]], w_desc.layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=_GROUPS)
        mbarrier.init(full.index(stage), count=2)  # who asks for weights, and who brings rows
    let_next_start(PDL)
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    two: gl.constexpr = 2
    gl.warp_specialize(
        [
            (
                _multiply,
                (x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, out_ptr, num_tiles, N, K, ROWS,
                 GROUP, FOUR, NUM_PROGRAMS, EPILOGUE, PDL, zero),
            ),
            (
                _multiply,
                (x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, out_ptr, num_tiles, N, K, ROWS,
                 GROUP, FOUR, NUM_PROGRAMS, EPILOGUE, PDL, one),
            ),
            (
                _multiply,
                (x_ring, w_ring, free, full, scales_ptr, pairs_ptr, tile_experts_ptr, out_ptr, num_tiles, N, K, ROWS,
                 GROUP, FOUR, NUM_PROGRAMS, EPILOGUE, PDL, two),
            ),
            (
                _gather,
                (x_ptr, w_desc, pairs_ptr, tile_experts_ptr, x_ring, w_ring, free, full, num_tiles, PER_ROW, N, K,
                 FOUR, NUM_PROGRAMS, PDL),
            ),
        ],
        [4, 4, 4],
        [152, 152, 56],
    )  # fmt: skip
