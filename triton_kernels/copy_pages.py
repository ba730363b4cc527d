"""Copy whole pages of the KV cache, of many layers at once: answers to one prompt part on a page.

Knows the shape of what layers hold that hold as much, [layer, k/v, page, kv head, token, dim], or with one part in
place of two; whose pages they are, and why, is the plan's matter.

Shape suffixes: P pairs of pages.
"""

from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, FP8, check_contiguous, check_dtype, check_shape
from tercet.triton_kernels.copy_places import copy_places


def copy_pages(kv_cache: Tensor, pairs_P2: Tensor) -> None:
    """Copy page `pairs_P2[p, 0]` over page `pairs_P2[p, 1]`, in place. The pairs are int32. Graph-safe.

    A pair that points outside the cache, such as (-1, -1), does nothing. A page that is copied over stands in no other
    pair: the order of copies is open.
    """
    parts = 1 if kv_cache.ndim == 6 and kv_cache.shape[1] == 1 else 2
    check_shape("kv_cache", kv_cache, None, parts, None, None, None, None)
    check_dtype("kv_cache", kv_cache, *FLOATS, FP8)
    check_contiguous("kv_cache", kv_cache)
    copy_places(kv_cache.flatten(0, 1), pairs_P2)
