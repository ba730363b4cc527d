"""Copy whole pages of the KV cache, of all layers at once: answers to one prompt part on a page.

Knows the cache's shape, [layer, k/v, page, kv head, token, dim], or with one part in place of two; whose pages they
are, and why, is the plan's matter.

Shape suffixes: P pairs of pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, FP8, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_BLOCK = 4096
_SIZES = ["num_pages"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _copy_pages_kernel(cache_ptr, pairs_ptr, num_pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (P, layers x k/v, tiles of a page): one program copies BLOCK numbers. A pair outside is skipped."""
    source = tl.load(pairs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    if (source >= 0) & (source < num_pages) & (target >= 0) & (target < num_pages):
        first = tl.program_id(1).to(tl.int64) * num_pages
        offset = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < PAGE
        numbers = tl.load(cache_ptr + (first + source) * PAGE + offset, mask=mask)
        tl.store(cache_ptr + (first + target) * PAGE + offset, numbers, mask=mask)


def copy_pages(kv_cache: Tensor, pairs_P2: Tensor) -> None:
    """Copy page `pairs_P2[p, 0]` over page `pairs_P2[p, 1]`, in place. The pairs are int32. Graph-safe.

    A pair that points outside the cache, such as (-1, -1), does nothing. A page that is copied over stands in no other
    pair: the order of copies is open.
    """
    parts = 1 if kv_cache.ndim == 6 and kv_cache.shape[1] == 1 else 2
    check_shape("kv_cache", kv_cache, None, parts, None, None, None, None)
    check_dtype("kv_cache", kv_cache, *FLOATS, FP8)
    check_contiguous("kv_cache", kv_cache)
    check_shape("pairs", pairs_P2, None, 2)
    check_dtype("pairs", pairs_P2, torch.int32)
    check_contiguous("pairs", pairs_P2)
    check_device("pairs", pairs_P2, kv_cache)
    if not use_kernels(kv_cache):
        copy_pages_reference(kv_cache, pairs_P2)
    elif pairs_P2.shape[0]:
        num_layers, _, num_pages, num_kv_heads, page_size, head_dim = kv_cache.shape
        page = num_kv_heads * page_size * head_dim
        block = min(_BLOCK, next_power_of_2(page))
        _copy_pages_kernel[(pairs_P2.shape[0], parts * num_layers, cdiv(page, block))](
            kv_cache, pairs_P2, num_pages, PAGE=page, BLOCK=block, num_warps=4
        )


def copy_pages_reference(kv_cache: Tensor, pairs_P2: Tensor) -> None:
    """The same in PyTorch."""
    inside_P = ((pairs_P2 >= 0) & (pairs_P2 < kv_cache.shape[2])).all(1)
    sources_P, targets_P = pairs_P2[inside_P].long().unbind(1)
    kv_cache[:, :, targets_P] = kv_cache[:, :, sources_P]
