"""The write of new keys and values into their pages.

Shape suffixes: T tokens, H kv heads, D head size; caches are of one layer, [page, kv head, token of the page, D].
"""

import torch
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_same, check_shape


def write_kv(k_THD: Tensor, v_THD: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots_T: Tensor) -> None:
    """Copy token t to slot `kv_slots_T[t]` = page * page size + offset of both caches. The slots are int64."""
    num_kv_heads, _, head_dim = k_cache.shape[1:]
    check_shape("k", k_THD, None, num_kv_heads, head_dim)
    check_shape("v", v_THD, *k_THD.shape)
    check_dtype("k", k_THD, k_cache.dtype)
    check_dtype("v", v_THD, k_cache.dtype)
    check_contiguous("k_cache", k_cache)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_same("v_cache", v_cache, k_cache)
    check_shape("kv_slots", kv_slots_T, k_THD.shape[0])
    check_dtype("kv_slots", kv_slots_T, torch.int64)
    check_device("kv_slots", kv_slots_T, k_THD)
    write_kv_reference(k_THD, v_THD, k_cache, v_cache, kv_slots_T)


def write_kv_reference(k_THD: Tensor, v_THD: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots_T: Tensor) -> None:
    """The same in PyTorch."""
    page_size = k_cache.shape[2]
    pages_T, offsets_T = kv_slots_T // page_size, kv_slots_T % page_size
    k_cache[pages_T, :, offsets_T] = k_THD
    v_cache[pages_T, :, offsets_T] = v_THD
