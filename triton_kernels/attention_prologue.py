"""From a layer's fused q, k, v rows to queries and a filled cache: head norms, rotary, and the write of K and V.

Shape suffixes: T tokens, N = q heads + 2 kv heads times head size, H q heads, D head size, P positions, R rotary
dimension; caches are of one layer, [page, kv head, token of the page, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.checks import (
    FLOATS,
    FP8,
    check_contiguous,
    check_device,
    check_dtype,
    check_indices,
    check_same,
    check_shape,
)
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.partial_prologue import partial_prologue_kernel
from tercet.triton_kernels.rotary import check_cos_sin, rotary
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.write_kv import write_kv

_TOKENS = 4
"""Of one program: enough loads in flight, and for any number of tokens the same sums."""
_WIDE, _MOST_AT_ONCE = 256, 8192
"""From which head size on the kernel for heads of which a part turns was compared with the other one, and is better;
how many numbers of a token's queries a program of it may hold."""
_SIZES = ["T", "num_cells", "P", "first_row"]


@triton.jit
def _load_halves(ptrs, inside, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Of each row the numbers that turn, in two halves; fp32."""
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    mask = inside & (columns < HALF)
    x = tl.load(ptrs + columns, mask=mask, other=0.0)
    y = tl.load(ptrs + HALF + columns, mask=mask, other=0.0)
    return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def norm_and_turn(x, y, squares, norm0, norm1, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads in two halves, normed and turned by their position; fp32, to be rounded once."""
    if NORM:
        inverse = tl.rsqrt(squares / D + eps)
        x *= inverse * norm0
        y *= inverse * norm1
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _turn_heads(
    from_ptrs, to_ptrs, norm_ptr, norm0, norm1, cos, sin, eps, inside, kept,
    D: tl.constexpr, R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORM: tl.constexpr,
    BEHIND: tl.constexpr,
):  # fmt: skip
    """Heads, one a row: normed and turned, in one order or the other, rounded once and, where `kept`, stored. What lies
    behind R does not turn."""
    HALF: tl.constexpr = R // 2
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    rest = R + tl.arange(0, BLOCK_REST)[None, :]
    x, y = _load_halves(from_ptrs, inside, HALF, BLOCK_HALF)
    squares = tl.sum(x * x + y * y, 1)[:, None]
    if R < D:
        z = tl.load(from_ptrs + rest, mask=inside & (rest < D), other=0.0).to(tl.float32)
        squares += tl.sum(z * z, 1)[:, None]
    x, y = norm_and_turn(x, y, squares, norm0, norm1, cos, sin, eps, D, NORM and not BEHIND)
    if BEHIND:
        inverse = tl.rsqrt(tl.sum(x * x + y * y, 1)[:, None] / D + eps)
        x *= inverse * norm0
        y *= inverse * norm1
    dtype = to_ptrs.dtype.element_ty
    turned = kept & (columns < HALF)
    tl.store(to_ptrs + columns, x.to(dtype), mask=turned)
    tl.store(to_ptrs + HALF + columns, y.to(dtype), mask=turned)
    if R < D:
        if NORM:
            z *= tl.rsqrt(squares / D + eps) * tl.load(norm_ptr + rest, mask=rest < D, other=0.0).to(tl.float32)
        tl.store(to_ptrs + rest, z.to(dtype), mask=kept & (rest < D))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _prologue_kernel(
    qkv_ptr, positions_ptr, kv_slots_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps, k_cache_ptr, v_cache_ptr, q_ptr,
    rows_ptr, T, num_cells, P, first_row,
    H: tl.constexpr, KV_HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, NORM: tl.constexpr, BEHIND: tl.constexpr, NORM_VALUES: tl.constexpr,
    HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / TOKENS * KV_HEADS,): one program owns a kv head of some tokens and the q heads that share it.

    From the last tokens to the first, all heads of each: of many tokens the L2 cache still holds what was written last.
    """
    let_next_start(PDL)
    G: tl.constexpr = H // KV_HEADS
    HALF: tl.constexpr = R // 2
    kv_head = tl.program_id(0) % KV_HEADS
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr) - first_row)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS * TOKENS
    # Where tokens stand is in the plan, which may be read before the wait.
    rows = first + tl.arange(0, TOKENS * BLOCK_G)[:, None] // BLOCK_G
    group = tl.arange(0, TOKENS * BLOCK_G)[:, None] % BLOCK_G
    tokens = first + tl.arange(0, TOKENS)[:, None]
    of_row = tl.load(positions_ptr + rows, mask=rows < T, other=0)
    of_token = tl.load(positions_ptr + tokens, mask=tokens < T, other=0)
    cells = tl.load(kv_slots_ptr + tokens, mask=tokens < T, other=-1)
    turn_ptrs = cos_sin_ptr + tl.minimum(tl.maximum(of_row, 0), P - 1).to(tl.int64) * R
    q_cos, q_sin = _load_halves(turn_ptrs, rows < T, HALF, BLOCK_HALF)
    turn_ptrs = cos_sin_ptr + tl.minimum(tl.maximum(of_token, 0), P - 1).to(tl.int64) * R
    k_cos, k_sin = _load_halves(turn_ptrs, tokens < T, HALF, BLOCK_HALF)
    one = tl.arange(0, 1)[:, None]
    q_norm0, q_norm1 = _load_halves(q_norm_ptr + one, one == 0, HALF, BLOCK_HALF)
    k_norm0, k_norm1 = _load_halves(k_norm_ptr + one, one == 0, HALF, BLOCK_HALF)
    wait_for_previous(PDL)
    if first < T:
        q_ptrs = qkv_ptr + rows.to(tl.int64) * ROW + (kv_head * G + group) * D
        inside = (rows < T) & (group < G)
        _turn_heads(
            q_ptrs, q_ptr + (rows.to(tl.int64) * H + kv_head * G + group) * D, q_norm_ptr,
            q_norm0, q_norm1, q_cos, q_sin, eps, inside, inside, D, R, BLOCK_HALF, BLOCK_REST, NORM, BEHIND,
        )  # fmt: skip
        k_ptrs = qkv_ptr + tokens.to(tl.int64) * ROW + (H + kv_head) * D
        places = ((cells // PAGE * KV_HEADS + kv_head) * PAGE + cells % PAGE) * D
        kept = (tokens < T) & (cells >= 0) & (cells < num_cells)
        _turn_heads(
            k_ptrs, k_cache_ptr + places, k_norm_ptr,
            k_norm0, k_norm1, k_cos, k_sin, eps, tokens < T, kept, D, R, BLOCK_HALF, BLOCK_REST, NORM, BEHIND,
        )  # fmt: skip
        columns = tl.arange(0, BLOCK_D)[None, :]
        v = tl.load(k_ptrs + KV_HEADS * D + columns, mask=(tokens < T) & (columns < D), other=0.0)
        if NORM_VALUES:
            v = v.to(tl.float32)
            v = (v * tl.rsqrt(tl.sum(v * v, 1)[:, None] / D + eps)).to(v_cache_ptr.dtype.element_ty)
        tl.store(v_cache_ptr + places + columns, v, mask=kept & (columns < D))


def attention_prologue(
    qkv_TN: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    cos_sin_PR: Tensor,
    q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
    rows: Tensor | None = None,
    first_row: int = 0,
    *,
    behind: bool = False,
    norm_values: bool = False,
) -> Tensor:
    """[T, (H + 2 kv heads) D] -> q [T, H, D], normed and turned; K and V go into the caches at `kv_slots_T`. Rows may
    be parts of longer ones. `behind`: heads, of which all numbers turn, are normed when they have. `norm_values`:
    values are normed, too, without a weight.

    May use `qkv_TN` as scratch. fp32 inside, rounded once. Graph-safe. `rows`: how many rows there are in truth, int32
    [1] on the device, counted from `first_row` rows ahead of these; those behind may be left as they are. It, positions
    and slots are read before the wait: between what wrote them and this there must be a kernel that is launched without
    overlap (see overlap.py).
    """
    num_pages, num_kv_heads, page_size, head_dim = k_cache.shape
    T = qkv_TN.shape[0]
    check_dtype("qkv", qkv_TN, *FLOATS)
    check_contiguous("a row of qkv", qkv_TN[:1])
    check_shape("qkv", qkv_TN, None, (num_q_heads + 2 * num_kv_heads) * head_dim)
    check_prologue(
        qkv_TN, positions_T, kv_slots_T, cos_sin_PR, q_norm_weight_D, k_norm_weight_D, k_cache, v_cache, rows
    )
    if behind and (q_norm_weight_D is None or cos_sin_PR.shape[1] != head_dim):
        raise ValueError("behind: got no norms, or heads of which a part turns, wanted norms and heads that turn whole")
    if not use_kernels(qkv_TN):
        return attention_prologue_reference(
            qkv_TN, positions_T, kv_slots_T, cos_sin_PR, q_norm_weight_D, k_norm_weight_D, eps, k_cache, v_cache,
            num_q_heads, behind=behind, norm_values=norm_values,
        )  # fmt: skip
    q_THD = torch.empty(T, num_q_heads, head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
    norm = q_norm_weight_D is not None
    if T:
        rotary_dim, block_d = cos_sin_PR.shape[1], next_power_of_2(head_dim)
        tensors = (
            qkv_TN, positions_T, kv_slots_T, cos_sin_PR,
            q_norm_weight_D if norm else qkv_TN, k_norm_weight_D if norm else qkv_TN, eps, k_cache, v_cache, q_THD,
            positions_T if rows is None else rows, T, num_pages * page_size, cos_sin_PR.shape[0], first_row,
        )  # fmt: skip
        how = {
            "H": num_q_heads, "KV_HEADS": num_kv_heads, "ROW": qkv_TN.stride(0), "D": head_dim, "R": rotary_dim,
            "PAGE": page_size, "BLOCK_D": block_d, "BLOCK_HALF": next_power_of_2(rotary_dim // 2), "NORM": norm,
            "HAS_ROWS": rows is not None, **overlap_options(qkv_TN),
        }  # fmt: skip
        block_h = next_power_of_2(num_q_heads)
        if rotary_dim < head_dim >= _WIDE and block_h * block_d <= _MOST_AT_ONCE and not norm_values:
            warps = min(max(block_h * block_d // 1024, 1), 8)
            partial_prologue_kernel[(T,)](
                *tensors, BLOCK_H=block_h, BLOCK_KV=next_power_of_2(num_kv_heads), num_warps=warps, **how
            )
        else:
            block_g = next_power_of_2(num_q_heads // num_kv_heads)
            _prologue_kernel[(cdiv(T, _TOKENS) * num_kv_heads,)](
                *tensors, TOKENS=_TOKENS, BLOCK_G=block_g, BLOCK_REST=next_power_of_2(max(head_dim - rotary_dim, 1)),
                BEHIND=behind, NORM_VALUES=norm_values, num_warps=max(_TOKENS * block_g * block_d // 1024, 1), **how,
            )  # fmt: skip
    return q_THD


def check_prologue(
    x_TN: Tensor, positions_T: Tensor, kv_slots_T: Tensor, cos_sin_PR: Tensor, q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None,
) -> None:  # fmt: skip
    """What a prologue is told of its tokens, whose rows are `x_TN`, or raise."""
    check_places(x_TN, positions_T, kv_slots_T, rows)
    check_heads(x_TN, cos_sin_PR, q_norm_weight_D, k_norm_weight_D, k_cache, v_cache)


def check_places(x_TN: Tensor, positions_T: Tensor, kv_slots_T: Tensor, rows: Tensor | None) -> None:
    """Where tokens stand, where they go in the cache and how many there are, or raise."""
    for name, tensor in (("positions", positions_T), ("kv_slots", kv_slots_T)):
        check_shape(name, tensor, len(x_TN))
        check_contiguous(name, tensor)
        check_device(name, tensor, x_TN)
    check_dtype("positions", positions_T, torch.int32, torch.int64)
    check_dtype("kv_slots", kv_slots_T, torch.int64)
    if rows is not None:
        check_indices("rows", rows, x_TN, 1)


def check_heads(
    x_TN: Tensor, cos_sin_PR: Tensor, q_norm_weight_D: Tensor | None, k_norm_weight_D: Tensor | None, k_cache: Tensor,
    v_cache: Tensor,
) -> None:  # fmt: skip
    """What heads are turned and normed by, and where K and V go: for rows like `x_TN`, or raise."""
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_same("k_cache", k_cache, x_TN, FP8)
    check_same("v_cache", v_cache, k_cache)
    check_cos_sin(cos_sin_PR, x_TN, k_cache.shape[3])
    if (q_norm_weight_D is None) != (k_norm_weight_D is None):
        raise ValueError("q_norm_weight and k_norm_weight: got one, wanted both or neither")
    for name, norm in (("q_norm_weight", q_norm_weight_D), ("k_norm_weight", k_norm_weight_D)):
        if norm is not None:
            check_shape(name, norm, k_cache.shape[3])
            check_same(name, norm, x_TN, torch.float32)


def attention_prologue_reference(
    qkv_TN: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    cos_sin_PR: Tensor,
    q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
    *,
    behind: bool = False,
    norm_values: bool = False,
) -> Tensor:
    """The same, step by step."""
    num_kv_heads, _, head_dim = k_cache.shape[1:]
    heads_THD = qkv_TN.view(qkv_TN.shape[0], num_q_heads + 2 * num_kv_heads, head_dim)
    q_THD, k_THD, v_THD = torch.split(heads_THD, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm_weight_D is not None and k_norm_weight_D is not None:
        q_THD, k_THD = q_THD.contiguous(), k_THD.contiguous()
        if behind:
            rotary(q_THD, k_THD, positions_T, cos_sin_PR)
        q_THD, k_THD = rms_norm(q_THD, q_norm_weight_D, eps), rms_norm(k_THD, k_norm_weight_D, eps)
        if not behind:
            rotary(q_THD, k_THD, positions_T, cos_sin_PR)
    else:
        # Without norms q and k are still side by side and turn as one.
        rotary(heads_THD[:, : num_q_heads + num_kv_heads], heads_THD[:, :0], positions_T, cos_sin_PR)
        q_THD = q_THD.contiguous()
    if norm_values:
        v_THD = rms_norm(v_THD.contiguous(), v_THD.new_ones(head_dim), eps)
    write_kv(k_THD, v_THD, k_cache, v_cache, kv_slots_T)
    return q_THD
