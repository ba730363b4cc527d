"""From a layer's fused q, k, v rows to queries and a filled cache: head norms, rotary, and the write of K and V.

Shape suffixes: T tokens, N = q heads + 2 kv heads times head size, H q heads, D head size, P positions, R rotary
dimension; caches are of one layer, [page, kv head, token of the page, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.rotary import rotary
from tercet.triton_kernels.write_kv import write_kv

_FEW_TOKENS = 512
"""Up to here a program for each token and kv head; beyond, programs for several."""
_SIZES = ["T", "num_cells", "P", "first_row"]


@triton.jit
def norm_and_turn(
    head_ptrs, norm_ptr, cos_ptrs, eps, mask, columns,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads, [heads, D], normed, then turned by their positions' rows of cosines and sines; fp32.

    The other half of each pair is loaded a second time, from its own address: it needs no exchange between threads.
    """
    x = tl.load(head_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
    half: tl.constexpr = R // 2
    partner = tl.where(columns < half, columns + half, columns - half)
    turns = columns < R
    y = tl.load(head_ptrs + partner, mask=mask & turns, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= inverse * tl.load(norm_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        y *= inverse * tl.load(norm_ptr + partner, mask=turns, other=0.0).to(tl.float32)
    angle = columns % half
    cos = tl.load(cos_ptrs + angle, mask=mask & turns, other=1.0)
    sin = tl.load(cos_ptrs + half + angle, mask=mask & turns, other=0.0)
    return x * cos + tl.where(columns < half, -y, y) * sin


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _prologue_kernel(
    qkv_ptr, positions_ptr, kv_slots_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps, k_cache_ptr, v_cache_ptr, q_ptr,
    rows_ptr, T, num_cells, P, first_row,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / TOKENS, KV_HEADS): one program owns a kv head of some tokens and the q heads that share it.

    It takes its tokens one after another: how it sums a head, and so a token's bits, are the same for any T.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    G: tl.constexpr = H // KV_HEADS
    kv_head = tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)[None, :]
    group = tl.arange(0, BLOCK_G)[:, None]
    q_heads = kv_head * G + group
    q_mask = (group < G) & (columns < D)
    one = tl.arange(0, 1)[:, None]
    first = tl.program_id(0) * TOKENS
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr) - first_row)
    for token in range(first, tl.minimum(first + TOKENS, T)):
        row = tl.cast(token, tl.int64)
        position = tl.load(positions_ptr + row).to(tl.int64)
        slot = tl.load(kv_slots_ptr + row)
        cos_ptr = cos_sin_ptr + tl.minimum(tl.maximum(position, 0), P - 1) * R
        heads_ptr = qkv_ptr + row * ((H + 2 * KV_HEADS) * D)
        q = norm_and_turn(heads_ptr + q_heads * D, q_norm_ptr, cos_ptr + group * 0, eps, q_mask, columns, D, R, NORM)
        tl.store(q_ptr + (row * H + q_heads) * D + columns, q.to(q_ptr.dtype.element_ty), mask=q_mask)
        k_ptrs = heads_ptr + (H + kv_head + one) * D
        k = norm_and_turn(k_ptrs, k_norm_ptr, cos_ptr + one, eps, columns < D, columns, D, R, NORM)
        v = tl.load(k_ptrs + KV_HEADS * D + columns, mask=columns < D, other=0.0)
        cell = ((slot // PAGE * KV_HEADS + kv_head) * PAGE + slot % PAGE) * D
        mask = (columns < D) & (slot >= 0) & (slot < num_cells)
        tl.store(k_cache_ptr + cell + columns, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(v_cache_ptr + cell + columns, v, mask=mask)


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
) -> Tensor:
    """[T, (H + 2 kv heads) D] -> q [T, H, D], normed and turned; K and V go into the caches at `kv_slots_T`.

    May use `qkv_TN` as scratch. fp32 inside, rounded once. Graph-safe. `rows`: how many rows there are in truth, int32
    [1] on the device, counted from `first_row` rows ahead of these; those behind may be left as they are.
    """
    num_pages, num_kv_heads, page_size, head_dim = k_cache.shape
    T = qkv_TN.shape[0]
    check_dtype("qkv", qkv_TN, *FLOATS)
    check_contiguous("qkv", qkv_TN)
    check_shape("qkv", qkv_TN, None, (num_q_heads + 2 * num_kv_heads) * head_dim)
    check_same("k_cache", k_cache, qkv_TN)
    check_same("v_cache", v_cache, qkv_TN)
    check_shape("positions", positions_T, T)
    check_device("positions", positions_T, qkv_TN)
    check_shape("kv_slots", kv_slots_T, T)
    check_dtype("kv_slots", kv_slots_T, torch.int64)
    if (q_norm_weight_D is None) != (k_norm_weight_D is None):
        raise ValueError("q_norm_weight and k_norm_weight: got one, wanted both or neither")
    if not use_kernels(qkv_TN):
        return attention_prologue_reference(
            qkv_TN, positions_T, kv_slots_T, cos_sin_PR, q_norm_weight_D, k_norm_weight_D, eps, k_cache, v_cache,
            num_q_heads,
        )  # fmt: skip
    q_THD = torch.empty(T, num_q_heads, head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
    norm = q_norm_weight_D is not None
    if T:
        tokens = 1 if T <= _FEW_TOKENS else 8
        _prologue_kernel[(triton.cdiv(T, tokens), num_kv_heads)](
            qkv_TN, positions_T, kv_slots_T, cos_sin_PR,
            q_norm_weight_D if norm else qkv_TN, k_norm_weight_D if norm else qkv_TN, eps, k_cache, v_cache, q_THD,
            positions_T if rows is None else rows, T, num_pages * page_size, cos_sin_PR.shape[0], first_row,
            H=num_q_heads, KV_HEADS=num_kv_heads, D=head_dim, R=cos_sin_PR.shape[1], PAGE=page_size,
            TOKENS=tokens, BLOCK_G=triton.next_power_of_2(num_q_heads // num_kv_heads),
            BLOCK_D=triton.next_power_of_2(head_dim), NORM=norm, HAS_ROWS=rows is not None, num_warps=1,
            **overlap_options(qkv_TN),
        )  # fmt: skip
    return q_THD


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
) -> Tensor:
    """The same, step by step."""
    num_kv_heads, _, head_dim = k_cache.shape[1:]
    heads_THD = qkv_TN.view(qkv_TN.shape[0], num_q_heads + 2 * num_kv_heads, head_dim)
    q_THD, k_THD, v_THD = torch.split(heads_THD, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm_weight_D is not None and k_norm_weight_D is not None:
        q_THD = rms_norm(q_THD.contiguous(), q_norm_weight_D, eps)
        k_THD = rms_norm(k_THD.contiguous(), k_norm_weight_D, eps)
        rotary(q_THD, k_THD, positions_T, cos_sin_PR)
    else:
        # Without norms q and k are still side by side and turn as one.
        rotary(heads_THD[:, : num_q_heads + num_kv_heads], heads_THD[:, :0], positions_T, cos_sin_PR)
        q_THD = q_THD.contiguous()
    write_kv(k_THD, v_THD, k_cache, v_cache, kv_slots_T)
    return q_THD
