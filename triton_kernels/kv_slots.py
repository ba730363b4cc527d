"""Where tokens' keys and values go: a page of their slot, and a place in it, in each of its page tables.

Shape suffixes: X page tables, T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.slot_table import SlotTable


@triton.jit
def kv_slot(page_table_ptr, slot, position, alive, page_size, M, num_pages, padding):
    """Where a token's K and V go; `padding` says where in page 0 those that go nowhere do."""
    index = position // page_size
    page = tl.load(page_table_ptr + slot.to(tl.int64) * M + index, mask=alive & (index < M), other=0)
    page = tl.where((page > 0) & (page < num_pages), page, 0)
    offset = tl.where(page > 0, position, padding) % page_size
    return page.to(tl.int64) * page_size + offset


@triton.jit
def store_kv_slots(
    kv_slots_ptr, page_table_ptr, token, slot, position, alive, mask, padding, S, M, stride, num_pages,
    X: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Where tokens' K and V go, of each page table."""
    for table in tl.static_range(X):
        rows_ptr = page_table_ptr + tl.cast(S, tl.int64) * M * table
        cell = kv_slot(rows_ptr, slot, position, alive, PAGE, M, num_pages, padding)
        tl.store(kv_slots_ptr + tl.cast(stride, tl.int64) * table + token, cell, mask=mask)


def check_kv_slots(kv_slots_XT: Tensor, table: SlotTable, num_tokens: int) -> None:
    """A row of so many for each page table, or raise."""
    check_shape("kv_slots", kv_slots_XT, table.num_page_tables, num_tokens)
    check_dtype("kv_slots", kv_slots_XT, torch.int64)
    check_device("kv_slots", kv_slots_XT, table.length_S)
    check_contiguous("a row of kv_slots", kv_slots_XT[0])
