"""Decode attention straight from a layer's q, k, v rows: head norms, rotary, the new token's K and V into the cache,
and attention to what it sees of those before it, in two launches. On Hopper, also of layers with a window or sinks;
elsewhere, and with soft caps or ALiBi, prologue and attention are apart. A step's plan says which of four kernels
serves it: one made for bandwidth, one for few rows, one for few rows of several new tokens each, one that cuts rows at
fixed positions, so that a row's bits are its own.

Shape suffixes: B decode rows, or their new tokens, T, where each has several, N = q heads + 2 kv heads times head size,
H q heads, D head size, S slots, M pages of a slot, P positions, R how many of a head's numbers turn; caches are of one
layer, [page, kv head, token of the page, D].
"""

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor

from tercet.triton_kernels.attention_prologue import check_heads
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import (
    FP8,
    check_contiguous,
    check_indices,
    check_of_heads,
    check_same,
    check_shape,
)
from tercet.triton_kernels.decode_few import launch_few_rows
from tercet.triton_kernels.decode_fixed import fixed_decode_kernel
from tercet.triton_kernels.decode_hopper import hopper_decode_kernel
from tercet.triton_kernels.decode_shares import (
    WORKER_WORDS,
    DecodeShares,
    make_decode_shares,
    plan_decode_shares,
)
from tercet.triton_kernels.decode_tried import launch_tried_rows
from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.few_rows import FewRows, make_few_rows, plan_few_rows
from tercet.triton_kernels.fixed_splits import FixedSplits, make_fixed_splits, plan_fixed_splits
from tercet.triton_kernels.merge_parts import merge_parts_kernel
from tercet.triton_kernels.merge_splits import merge_splits
from tercet.triton_kernels.tiles import hopper_descriptor
from tercet.triton_kernels.windows import most_tiles

_MOST_HEADS = {64: 16, 128: 16, 256: 8, 512: 8}
"""By the numbers of a head that is fused, q heads of one kv head at most: columns of a matrix product, and queries that
fit registers."""
_TILE_BYTES, _LEAST_TILE = 64, 16
"""Of one of the numbers that a token has: tiles of 32 tokens, in FP8 of 64; of heads of 256 numbers half of that, of
512 what a product has at least."""
_BYTES_ON_THEIR_WAY = 192 * 1024
"""Keys and values, to all workers of a multiprocessor: to each three tiles, or six of heads of 64 numbers, or two of
512."""
_PIECE = 64
"""Numbers of 16 bits of a head that the copy engine brings in one piece, at most."""
_WORKERS_PER_MULTIPROCESSOR, _WORKERS_OF_LARGE = 4, 3
"""And of heads of more than 256 numbers."""
_MERGED_PARTS, _MERGE_WARPS = 8, 1

_FEW_ROWS = 1
"""Up to here the kernel for few rows, if nothing is known of their length: two to four it serves faster while they are
short."""
LONG = 2**30
"""As what is known of a row's length: it is so long that bytes count, not instructions behind each other."""
_FEW_SEEN = 2048
"""Up to here, tokens that all rows see because of a window, that kernel too."""
_FEW_TILE = 64
_FEW_TRIED = 8
"""Up to here rows that try several tokens each, too."""
_MOST_TRIED = 32 * 128
"""Numbers of their queries of one kv head: more do not fit registers."""
_SPLIT = 256
"""Tokens of a fixed split; twice as many of heads of 512 numbers, whose sums are twice as large."""

FusedPlan = DecodeShares | FewRows | FixedSplits


def can_fuse_decode(
    k_cache: Tensor, num_q_heads: int, rotary_dim: int, scoring: Scoring, *, tries: int = 1, num_rows: int = 1,
    longest: int = 0,
) -> bool:  # fmt: skip
    """Whether a fused kernel knows these shapes and this way of scoring.

    Not windows of one, in which nothing is left of the cache. Rows of several tokens each (`tries`) only the kernel for
    few rows knows: there may not be many, nor `LONG` ones, but for what little a window lets them see.
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    group = num_q_heads // num_kv_heads
    fits = group <= _MOST_HEADS.get(head_dim, 0) and _turns(rotary_dim, head_dim) and page_size % 32 == 0
    fits = fits and k_cache.dtype.itemsize <= 2
    if tries > 1:
        fits = fits and tries * group * head_dim <= _MOST_TRIED
        fits = fits and (_see_few(num_rows, scoring.window) or (num_rows <= _FEW_TRIED and longest < LONG))
    fits = fits and not scoring.softcap and scoring.alibi_slopes_H is None and scoring.window != 1
    return fits and is_hopper(k_cache.device)


def plan_fused_decode(
    decode_lengths_B: Tensor,
    decode_slots_B: Tensor,
    page_table_SM: Tensor,
    num_q_heads: int,
    k_cache: Tensor,
    *,
    window: int = 0,
    deterministic: bool = False,
    longest: int = 0,
    tries: int = 1,
    lengths_T: Tensor | None = None,
) -> FusedPlan:
    """Share out a step's decode rows for the layers that are fused. Graph-safe: once per step.

    `window`: of the layers that it is for, see `Scoring`. `deterministic`: a row's bits depend on nothing else in the
    step. `longest`: tokens that a row has at most, of a few that are known to be short, or `LONG`: they are attended to
    faster then, and others rightly. `tries`, `lengths_T`: tokens of each row, as in `decode_attention`.
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    num_rows = decode_slots_B.shape[0]
    check_indices("decode_slots", decode_slots_B, k_cache, num_rows)
    check_indices("decode_lengths", decode_lengths_B, k_cache, num_rows)
    check_indices("page_table", page_table_SM, k_cache, None, None)
    num_workers = _workers_each(head_dim) * multiprocessors(k_cache.device)
    max_tokens = page_table_SM.shape[1] * page_size
    tile = min(max(_TILE_BYTES // k_cache.dtype.itemsize // max(head_dim // 128, 1), _LEAST_TILE), page_size)
    if lengths_T is not None:
        check_indices("lengths", lengths_T, k_cache, num_rows * tries)
    if deterministic:
        split = _SPLIT * max(head_dim // 256, 1) // tile
        splits = make_fixed_splits(
            decode_lengths_B, max_tokens, num_workers, num_q_heads, head_dim, tile, split, window=window
        )
        plan_fixed_splits(decode_slots_B, splits)
        return splits
    if tries > 1 or _see_few(num_rows, window) or _are_few(num_rows, longest, head_dim):
        # No more than there can be tiles: until those that find nothing to do have gone, the kernels behind have no
        # room to load their weights.
        few_tile = _FEW_TILE // max(head_dim // 128, 1)
        num_tiles = num_rows * num_kv_heads * most_tiles(longest or max_tokens, few_tile, window)
        num_workers = min(num_workers, num_tiles)
        few = make_few_rows(
            decode_lengths_B if lengths_T is None else lengths_T, num_workers, num_q_heads, num_kv_heads, head_dim,
            few_tile, window=window, tries=tries,
        )  # fmt: skip
        plan_few_rows(decode_slots_B, page_table_SM, few, page_size, num_kv_heads)
        return few
    if num_rows * num_kv_heads <= num_workers:
        # A round number: the few pairs of a row and a head are cut alike, and some batches not at all.
        num_workers = max(num_workers // 64 * 64, 16)
    shares = make_decode_shares(decode_lengths_B, num_workers, num_q_heads, num_kv_heads, head_dim, tile, window=window)
    plan_decode_shares(decode_slots_B, shares, num_kv_heads)
    return shares


def fused_decode_attention(
    qkv_BN: Tensor,
    cos_sin_PR: Tensor,
    q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_SM: Tensor,
    shares: FusedPlan,
    num_q_heads: int,
    scale: float,
    out_BHD: Tensor,
    sinks_H: Tensor | None = None,
    shifts_S: Tensor | None = None,
    *,
    norm_values: bool = False,
) -> None:
    """[B, (H + 2 kv heads) D] -> `out_BHD`; K and V of row b go to position length - 1 of its slot.

    Rows may be parts of longer ones. Those of length 0 give zeros and write nothing; so do those that are no tokens
    where a plan is for several of each, behind each other. Softmax and norms in fp32; q and k are rounded once, as the
    prologue rounds them. `sinks_H`: see `Scoring`. `shifts_S`: how much further each slot's tokens are turned than they
    are counted. `norm_values`: values are normed, too, without a weight. Graph-safe. Keys of earlier steps, page tables
    and shares are read before the wait: between what wrote them and this there must be a kernel that is launched
    without overlap (see overlap.py).
    """
    num_pages, num_kv_heads, page_size, head_dim = k_cache.shape
    B, group = out_BHD.shape[0], num_q_heads // num_kv_heads
    check_contiguous("a row of qkv", qkv_BN[:1])
    check_shape("qkv", qkv_BN, B, (num_q_heads + 2 * num_kv_heads) * head_dim)
    check_same("out", out_BHD, qkv_BN)
    check_shape("out", out_BHD, B, num_q_heads, head_dim)
    if not _turns(cos_sin_PR.shape[-1], head_dim):
        wanted = f"[positions, {head_dim}, or {head_dim // 2} at most]"
        raise ValueError(f"cos_sin: got shape {list(cos_sin_PR.shape)}, wanted {wanted}")
    check_heads(qkv_BN, cos_sin_PR, q_norm_weight_D, k_norm_weight_D, k_cache, v_cache)
    check_indices("page_table", page_table_SM, qkv_BN, None, None)
    if sinks_H is not None:
        check_of_heads("sinks", sinks_H, num_q_heads, qkv_BN)
    if isinstance(shares, FewRows):
        launch = launch_few_rows if shares.tries == 1 else launch_tried_rows
        launch(
            qkv_BN, cos_sin_PR, shifts_S, q_norm_weight_D, k_norm_weight_D, eps, k_cache, v_cache, page_table_SM,
            shares, num_q_heads, scale, sinks_H, out_BHD, norm_values,
        )  # fmt: skip
        return
    check_shape("lengths", shares.lengths_B, B)
    norm = q_norm_weight_D is not None
    sizes = {
        "H": num_q_heads, "KV_HEADS": num_kv_heads, "ROW": qkv_BN.stride(0), "D": head_dim, "R": cos_sin_PR.shape[1],
        "PAGE": page_size, "NORM": norm, "NORM_VALUES": norm_values,
    }  # fmt: skip
    ring = _BYTES_ON_THEIR_WAY // _workers_each(head_dim)
    stages = ring // (2 * shares.tile * head_dim * k_cache.dtype.itemsize)
    if isinstance(shares, FixedSplits):
        fixed_decode_kernel[(shares.num_workers,)](
            _descriptor(k_cache, shares.tile), _descriptor(v_cache, shares.tile), k_cache, v_cache, qkv_BN,
            q_norm_weight_D if norm else qkv_BN, k_norm_weight_D if norm else qkv_BN, cos_sin_PR, shifts_S,
            page_table_SM, sinks_H, shares.splits_I4, shares.num_splits_1, shares.starts_B, shares.part_IHD,
            shares.stats_IH2, out_BHD, eps, scale, page_table_SM.shape[1], cos_sin_PR.shape[0], num_pages,
            SPLIT=shares.split, STAGES=stages, NUM_WORKERS=shares.num_workers, WINDOW=shares.window,
            PDL=True, num_warps=1, launch_pdl=True, **sizes,
        )  # fmt: skip
        merge_splits(shares.counts_B, shares.starts_B, shares.part_IHD, shares.stats_IH2, out_BHD)
        return
    hopper_decode_kernel[(shares.num_workers,)](
        _descriptor(k_cache, shares.tile), _descriptor(v_cache, shares.tile), k_cache, v_cache, qkv_BN,
        q_norm_weight_D if norm else qkv_BN, k_norm_weight_D if norm else qkv_BN, cos_sin_PR, shifts_S,
        page_table_SM, sinks_H, shares.rows_B4, shares.workers_WN, shares.lengths_B, shares.part_IGD,
        shares.stats_IG2, out_BHD, eps, scale, B, page_table_SM.shape[1], cos_sin_PR.shape[0], num_pages,
        STAGES=stages, NUM_WORKERS=shares.num_workers, WINDOW=shares.window, PDL=True, num_warps=1,
        launch_pdl=True, **sizes,
    )  # fmt: skip
    merge_parts_kernel[(shares.num_workers, group)](
        shares.workers_WN, shares.part_IGD, shares.stats_IG2, out_BHD,
        H=num_q_heads, G=group, D=head_dim, BLOCK_I=_MERGED_PARTS, WORKER_WORDS=WORKER_WORDS, PDL=True,
        num_warps=_MERGE_WARPS, launch_pdl=True,
    )  # fmt: skip


def _workers_each(head_dim: int) -> int:
    """Of a multiprocessor."""
    return _WORKERS_PER_MULTIPROCESSOR if head_dim <= 256 else _WORKERS_OF_LARGE


def _turns(rotary_dim: int, head_dim: int) -> bool:
    """Whether all numbers of a head turn, or of its first half the first."""
    return rotary_dim == head_dim or rotary_dim <= head_dim // 2


def _are_few(num_rows: int, longest: int, head_dim: int) -> bool:
    """One long row with heads of 512, too: the other kernel has parts of it to merge for twice as long."""
    if longest < LONG:
        return longest > 0 or num_rows <= _FEW_ROWS
    return head_dim > 256 and num_rows <= _FEW_ROWS


def _see_few(num_rows: int, window: int) -> bool:
    return 0 < num_rows * window <= _FEW_SEEN


def _descriptor(cache: Tensor, tile: int) -> HopperDescriptor:
    """Tiles in pieces of the head, two or more, each by itself: what lies ahead of one is no other, but outside.

    Of FP8 two numbers go as one of 16 bits: matrices of bytes cannot be turned on their way to registers."""
    numbers = cache.view(torch.int16) if cache.dtype == FP8 else cache
    size = numbers.shape[3]
    width = min(size // 2, _PIECE)
    pieces = size // width
    return hopper_descriptor(numbers.view(-1, tile, pieces, width).transpose(1, 2), 1, pieces, tile, width)
