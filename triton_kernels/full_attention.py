"""Attention without a cache, of all tokens of a segment with each other: what encoders of images do.

Queries, keys and values are read where their product has left them, side by side. A segment is a whole image, or a
window of one. A head's numbers are cut into a part of a power of two and what is left: heads of 72 or 80 would fill
little more than half of 128. Where Hopper's own kernel (`full_attention_hopper.py`) can, it takes over.

Shape suffixes: T tokens, N numbers of a row (H query heads, H key heads, H value heads), D head size, S segments,
M numbers of an answer (H D).
"""

import itertools

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_indices
from tercet.triton_kernels.dispatch import (
    INTERPRETED,
    has_little_shared_memory,
    is_hopper,
    multiprocessors,
    use_kernels,
)
from tercet.triton_kernels.full_attention_hopper import TILE, WIDTH, hopper_full_attention_kernel
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, dot_block, hopper_descriptor, next_power_of_2
from tercet.triton_kernels.turn_rows import check_qkv

_MOST_OF_HEAD = 128
_KEYS = 64
"""Of a tile."""
_LONG = 320
"""Tokens of a segment for which Hopper's kernel, with its large tiles, is the faster one."""


@triton.jit
def _load_tile(
    qkv_ptr, first, column, end, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows from `first` on, up to `end`, of the WIDTH numbers from `column` on."""
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    pointers = qkv_ptr + rows.to(tl.int64)[:, None] * N + column + columns
    return tl.load(pointers, mask=(rows < end)[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def _full_attention_kernel(
    qkv_ptr, ends_ptr, out_ptr, unit,
    H: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest segment, H, S): one program owns a tile of queries of one head, if there are any.

    PART numbers of a head are multiplied at once, then the rest, for which there is room for BLOCK.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    N: tl.constexpr = 3 * H * D
    WIDTH: tl.constexpr = PART if D > PART else D
    REST: tl.constexpr = D - WIDTH
    segment = tl.program_id(2)
    end = tl.load(ends_ptr + segment)
    begin = tl.load(ends_ptr + segment - 1, mask=segment > 0, other=0)
    first = begin + tl.program_id(0) * BLOCK_Q
    if first < end:
        column = tl.program_id(1) * D
        q = _load_tile(qkv_ptr, first, column, end, N, BLOCK_Q, WIDTH, PART)
        q_rest = q
        largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, PART), tl.float32)
        acc_rest = weight
        if REST > 0:
            q_rest = _load_tile(qkv_ptr, first, column + PART, end, N, BLOCK_Q, REST, BLOCK)
            acc_rest = tl.zeros((BLOCK_Q, BLOCK), tl.float32)
        # No code of its own for a segment's end: as Triton 3.7.1 compiles that, what is left of heads goes wrong.
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            k = _load_tile(qkv_ptr, start, H * D + column, end, N, KEYS, WIDTH, PART)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if REST > 0:
                k_rest = _load_tile(qkv_ptr, start, H * D + column + PART, end, N, KEYS, REST, BLOCK)
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
            scores = tl.where((start + tl.arange(0, KEYS) < end)[None, :], scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1) * unit)
            # Times -1, which costs nothing: what negation compiles to is 0 minus it.
            weights = tl.exp2(tl.fma(scores, unit, new[:, None] * -1))
            rescale = tl.exp2(largest - new)
            largest = new
            weight = tl.fma(weight, rescale, tl.sum(weights, 1))
            v = _load_tile(qkv_ptr, start, 2 * H * D + column, end, N, KEYS, WIDTH, PART)
            weights = weights.to(v.dtype)
            acc = tl.dot(weights, v, acc * rescale[:, None], input_precision=PRECISION)
            if REST > 0:
                v_rest = _load_tile(qkv_ptr, start, 2 * H * D + column + PART, end, N, KEYS, REST, BLOCK)
                acc_rest = tl.dot(weights, v_rest, acc_rest * rescale[:, None], input_precision=PRECISION)
        rows = first + tl.arange(0, BLOCK_Q)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * (H * D) + column
        columns = tl.arange(0, PART)[None, :]
        there = (rows < end)[:, None]
        y = acc / weight[:, None]
        tl.store(out_ptrs + columns, y.to(out_ptr.dtype.element_ty), mask=there & (columns < WIDTH))
        if REST > 0:
            columns = tl.arange(0, BLOCK)[None, :]
            y = acc_rest / weight[:, None]
            tl.store(out_ptrs + PART + columns, y.to(out_ptr.dtype.element_ty), mask=there & (columns < REST))


def full_attention(qkv_TN: Tensor, ends_S: Tensor, longest: int, num_heads: int, scale: float) -> Tensor:
    """[T, 3 H D] -> [T, H D]: softmax(q k^T * scale) v among the tokens of each segment.

    `ends_S`: where segments end, int32 and in order; rows behind the last are not read, and their answers not written.
    `longest`: no segment has more tokens; nobody looks whether that is so. Mutates nothing; scores and sums in fp32;
    graph-safe.
    """
    check_qkv(qkv_TN, num_heads)
    check_indices("ends", ends_S, qkv_TN, None)
    T, D = len(qkv_TN), qkv_TN.shape[1] // (3 * num_heads)
    if D > _MOST_OF_HEAD:
        raise ValueError(f"qkv: got heads of {D} numbers, wanted {_MOST_OF_HEAD} at most")
    if not use_kernels(qkv_TN):
        return full_attention_reference(qkv_TN, ends_S, num_heads, scale)
    out_TM = qkv_TN.new_empty(T, num_heads * D)
    if not T:
        return out_TM
    if _can_use_hopper(qkv_TN, D, longest):
        _launch_hopper(qkv_TN, ends_S, longest, num_heads, scale, out_TM)
        return out_TM
    part, rest = _parts(D)
    half = qkv_TN.dtype.itemsize == 2
    keys = _KEYS if half else _KEYS // 2
    block_q = _query_tile(longest, num_heads * len(ends_S), qkv_TN)
    if INTERPRETED:
        keys = min(keys, max(16, next_power_of_2(longest)))
    _full_attention_kernel[(cdiv(longest, block_q), num_heads, len(ends_S))](
        qkv_TN, ends_S, out_TM, scale * 1.4426950408889634,
        H=num_heads, D=D, BLOCK_Q=block_q, KEYS=keys, PART=part, BLOCK=rest,
        PRECISION="tf32" if half else "ieee", STAGES=2 if has_little_shared_memory(qkv_TN.device) else 3,
        num_warps=8 if block_q > 64 else 4, **overlap_options(qkv_TN),
    )  # fmt: skip
    return out_TM


def _can_use_hopper(qkv_TN: Tensor, head_dim: int, longest: int) -> bool:
    width: int = WIDTH.value
    return (
        is_hopper(qkv_TN.device)
        and qkv_TN.dtype.itemsize == 2
        and width <= head_dim <= width + width // 2
        and head_dim % 8 == 0
        and longest >= _LONG
    )


def _launch_hopper(qkv_TN: Tensor, ends_S: Tensor, longest: int, num_heads: int, scale: float, out_TM: Tensor) -> None:
    T, D = len(qkv_TN), qkv_TN.shape[1] // (3 * num_heads)
    tile, width = TILE.value, WIDTH.value
    rest = dot_block(D - width) if width < D else 0
    num_tiles = cdiv(longest, tile)
    total = num_tiles * num_heads * len(ends_S)
    qkv_TXD = qkv_TN.view(T, 3 * num_heads, D)
    hopper_full_attention_kernel[(min(total, multiprocessors(qkv_TN.device)),)](
        hopper_descriptor(qkv_TXD, tile, 1, width), hopper_descriptor(qkv_TXD, tile, 1, rest or width), ends_S, out_TM,
        scale * 1.4426950408889634, num_tiles, total,
        H=num_heads, D=D, REST=rest, PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def full_attention_reference(qkv_TN: Tensor, ends_S: Tensor, num_heads: int, scale: float) -> Tensor:
    """The same in PyTorch."""
    out_TM = qkv_TN.new_empty(len(qkv_TN), qkv_TN.shape[1] // 3)
    q_HTD, k_HTD, v_HTD = qkv_TN.float().view(len(qkv_TN), 3, num_heads, -1).permute(1, 2, 0, 3)
    for begin, end in itertools.pairwise([0, *ends_S.tolist()]):
        q, k, v = (x_HTD[None, :, begin:end] for x_HTD in (q_HTD, k_HTD, v_HTD))
        out_TM[begin:end] = F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1).flatten(1)
    return out_TM


def _parts(head_dim: int) -> tuple[int, int]:
    """Room for what is multiplied at once of a head's numbers, and for what is left."""
    part = next_power_of_2(head_dim)
    if part == head_dim or part < 32:
        return dot_block(head_dim), 16
    return part // 2, dot_block(head_dim - part // 2)


def _query_tile(longest: int, segments: int, qkv_TN: Tensor) -> int:
    """Queries of a program: small tiles deal out more evenly where there are few, large ones read keys less often."""
    if INTERPRETED:
        return min(64, max(16, next_power_of_2(longest)))
    few = cdiv(longest, 128) * segments < multiprocessors(qkv_TN.device)
    return 64 if longest <= 64 or few or qkv_TN.dtype.itemsize == 4 else 128
