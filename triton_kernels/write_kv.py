"""Write new tokens' keys and values into a paged cache of one layer, [page, kv head, token of the page, D].

Shape suffixes: T tokens, H kv heads, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import (
    FLOATS,
    FP8,
    FP8_MOST,
    check_device,
    check_dtype,
    check_same,
    check_shape,
)
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2

_UNSPECIALISED = ["num_cells", "k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h"]


@triton.jit(do_not_specialize=_UNSPECIALISED, do_not_specialize_on_alignment=_UNSPECIALISED)
def _write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, kv_slots_ptr, num_cells, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program writes one token, all heads. A slot outside the cache is skipped."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slots_ptr + token)
    heads = tl.arange(0, BLOCK_H)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < H) & (columns < D) & (slot >= 0) & (slot < num_cells)
    k = tl.load(k_ptr + token * k_stride_t + heads * k_stride_h + columns, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + columns, mask=mask, other=0.0)
    cells = (slot // PAGE * H + heads) * PAGE + slot % PAGE
    tl.store(k_cache_ptr + cells * D + columns, k, mask=mask)
    tl.store(v_cache_ptr + cells * D + columns, v, mask=mask)


def write_kv(k_THD: Tensor, v_THD: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots_T: Tensor) -> None:
    """Copy token t to slot `kv_slots_T[t]` = page * page size + offset of both caches, rounded once to what they hold.

    The slots are int64. Graph-safe.
    k and v may be views of fused rows: only their last dimension has to be contiguous.
    """
    num_pages, num_kv_heads, page_size, head_dim = k_cache.shape
    check_shape("k", k_THD, None, num_kv_heads, head_dim)
    check_shape("v", v_THD, *k_THD.shape)
    check_dtype("k", k_THD, *FLOATS)
    check_dtype("v", v_THD, k_THD.dtype)
    check_same("k_cache", k_cache, k_THD, FP8)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_same("v_cache", v_cache, k_cache)
    check_shape("kv_slots", kv_slots_T, k_THD.shape[0])
    check_dtype("kv_slots", kv_slots_T, torch.int64)
    check_device("kv_slots", kv_slots_T, k_THD)
    if not use_kernels(k_THD):
        write_kv_reference(k_THD, v_THD, k_cache, v_cache, kv_slots_T)
        return
    for name, tensor in (("k", k_THD), ("v", v_THD)):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name}: got strides {list(tensor.stride())}, wanted 1 for the last dimension")
    if k_THD.shape[0]:
        _write_kv_kernel[(k_THD.shape[0],)](
            k_THD, v_THD, k_cache, v_cache, kv_slots_T, num_pages * page_size,
            k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
            H=num_kv_heads, D=head_dim, PAGE=page_size, BLOCK_H=next_power_of_2(num_kv_heads),
            BLOCK_D=next_power_of_2(head_dim), num_warps=4, **overlap_options(k_THD),
        )  # fmt: skip


def write_kv_reference(k_THD: Tensor, v_THD: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots_T: Tensor) -> None:
    """The same in PyTorch."""
    page_size = k_cache.shape[2]
    pages_T, offsets_T = kv_slots_T // page_size, kv_slots_T % page_size
    for cache, x_THD in ((k_cache, k_THD), (v_cache, v_THD)):
        if cache.dtype == FP8:
            x_THD = x_THD.clamp(-FP8_MOST, FP8_MOST)
        cache[pages_T, :, offsets_T] = x_THD.to(cache.dtype)
