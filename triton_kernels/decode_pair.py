"""One row and one kv head of decode attention on Hopper, in Gluon: tiles of keys and values, and what becomes of them.

A worker is one warp. The copy engine fills its ring of tiles. Knows nothing of which worker has what; the queries and
the softmax that tiles are added to come from `decode_newest.py`.

Shape suffixes: D head size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tercet.triton_kernels.decode_cells import load_keys, load_values, numbers_of_half
from tercet.triton_kernels.decode_newest import exp2
from tercet.triton_kernels.windows import first_seen


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr):
    """Shared memory for stages of tiles, each in two halves of the head: as the copy engine fills it, piece by piece,
    and as tiles."""
    PIECES: gl.constexpr = desc.block_shape[1]
    TILE: gl.constexpr = desc.block_shape[2]
    WIDTH: gl.constexpr = desc.block_shape[3]
    HALF: gl.constexpr = PIECES * WIDTH // 2
    boxes = gl.allocate_shared_memory(desc.dtype, [STAGES, 1, PIECES, TILE, WIDTH], desc.layout)
    # Pieces behind each other are laid out as a half of all of them is.
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=WIDTH * 2, element_bitwidth=16, rank=2)
    return boxes, boxes._reinterpret(desc.dtype, [STAGES * 2, TILE, HALF], LAYOUT)


@gluon.jit
def fetch(
    k_desc, v_desc, k_boxes, v_boxes, full, page, count, head, tile, known, num_pages,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Ask for one tile of keys and values.

    Of a row's last tile only what the row has is read. The copy begins so far ahead of the tile that it ends with the
    row's last token: what lies ahead of a tile is outside to the copy engine, which writes zeros in its place.
    """
    PIECES: gl.constexpr = k_desc.block_shape[1]
    TILE: gl.constexpr = k_desc.block_shape[2]
    WIDTH: gl.constexpr = k_desc.block_shape[3]
    STAGES: gl.constexpr = full.shape[0]
    stage = count % STAGES
    page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    place = (page * KV_HEADS + head) * (PAGE // TILE) + tile % (PAGE // TILE)
    first = gl.minimum(known - tile * TILE, TILE) - TILE
    bar = full.index(stage)
    mbarrier.expect(bar, 2 * PIECES * TILE * WIDTH * 2)
    tma.async_copy_global_to_shared(k_desc, [place, 0, first, 0], bar, k_boxes.index(stage))
    tma.async_copy_global_to_shared(v_desc, [place, 0, first, 0], bar, v_boxes.index(stage))


@gluon.jit
def _transpose_blocks(p, MMA: gl.constexpr):
    """Weights, [TILE, GROUP]: from where a product leaves its sums to where it has its right side, blocks of 8x8."""
    TILE: gl.constexpr = p.shape[0]
    GROUP: gl.constexpr = p.shape[1]
    turned = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], p.dtype, True, 2)
    blocks = gl.permute(gl.reshape(turned, (TILE // 8, 8, GROUP // 8, 8)), (0, 3, 2, 1))
    return gl.convert_layout(gl.reshape(blocks, (TILE, GROUP)), gl.DotOperandLayout(1, MMA, 2), True)


@gluon.jit
def attend_tile(k_ring, v_ring, stage, q0, q1, acc0, acc1, largest, weight, unit, start, known, WINDOW: gl.constexpr):
    """One tile in the softmax so far. A row's last tile ends with its last token (see `fetch`).

    Keys and values are the tall side of the products, a group's heads the narrow one, of 8 columns. `weight` is summed
    over tokens at the end alone.
    """
    MMA: gl.constexpr = acc0.type.layout
    TILE: gl.constexpr = k_ring.shape[1]
    GROUP: gl.constexpr = acc0.shape[1]
    TALL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    zeros = gl.zeros((TILE, GROUP), gl.float32, MMA)
    # Two sums, so that half as many products wait for each other.
    s = mma_v2(load_keys(k_ring.index(stage * 2), TALL), q0, zeros)
    s += mma_v2(load_keys(k_ring.index(stage * 2 + 1), TALL), q1, zeros)
    places = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    hidden = start + TILE - known
    if WINDOW > 0:
        # Also what is ahead of the window, which lies behind what the copy put ahead.
        hidden = gl.maximum(hidden, 0) + gl.maximum(first_seen(known, WINDOW) - start, 0)
    s = gl.where((places >= hidden)[:, None], s, float("-inf"))
    new = gl.maximum(largest, gl.max(s, 0) * unit)
    shrink = exp2(largest - new)
    weights = exp2(s * unit - new[None, :])
    weight = weight * shrink[None, :] + weights
    p = _transpose_blocks(weights.to(q0.dtype), MMA)
    acc0 = mma_v2(load_values(v_ring.index(stage * 2), TALL), p, acc0 * shrink[None, :])
    acc1 = mma_v2(load_values(v_ring.index(stage * 2 + 1), TALL), p, acc1 * shrink[None, :])
    return acc0, acc1, new, weight


@gluon.jit
def _store_heads(out_ptr, places, y0, y1, D: gl.constexpr, G: gl.constexpr, PAIRED: gl.constexpr):
    """The two halves of each head of the group, in rows of D numbers."""
    MMA: gl.constexpr = y0.type.layout
    half = numbers_of_half(D // 2, gl.SliceLayout(1, MMA), PAIRED)
    group = gl.arange(0, y0.shape[1], gl.SliceLayout(0, MMA))
    valid = (half < D // 2)[:, None] & (group < G)[None, :]
    ptrs = out_ptr + places[None, :] * D + half[:, None]
    gl.store(ptrs, y0, mask=valid)
    gl.store(ptrs + D // 2, y1, mask=valid)


@gluon.jit
def store_whole(out_ptr, first, acc0, acc1, weight, D: gl.constexpr, G: gl.constexpr, PAIRED: gl.constexpr):
    """A pair that nobody else has a part of. `first`: the place of its first head."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    places = first + gl.arange(0, acc0.shape[1], gl.SliceLayout(0, acc0.type.layout))
    whole = gl.sum(weight, 0)[None, :]
    _store_heads(out_ptr, places, (acc0 / whole).to(dtype), (acc1 / whole).to(dtype), D, G, PAIRED)


@gluon.jit
def store_part(
    part_ptr, stats_ptr, first, acc0, acc1, largest, weight, D: gl.constexpr, G: gl.constexpr, PAIRED: gl.constexpr
):
    """What is to be merged with other parts."""
    group = gl.arange(0, acc0.shape[1], gl.SliceLayout(0, acc0.type.layout))
    places = first + group
    _store_heads(part_ptr, places, acc0, acc1, D, G, PAIRED)
    gl.store(stats_ptr + places * 2, largest, mask=group < G)
    gl.store(stats_ptr + places * 2 + 1, gl.sum(weight, 0), mask=group < G)
