"""Where in inboxes with a flag a row (`RowInboxes`) a row and its flag are, as kernels reckon it.

Shape suffixes: P ranks, M rows that an inbox has places for.
"""

import triton
import triton.language as tl


@triton.jit
def place_ptr(address, call, source, row, columns, M, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr):
    """Where in an inbox the row of rank `source` in this call is."""
    # Memory is allocated at multiples of 16 bytes, and wide stores need to know.
    inbox_ptr = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
    return inbox_ptr + (((call & 1) * P + source).to(tl.int64) * M + row) * PLACE + columns


@triton.jit
def flag_ptr(address, call, source, row, M, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr):
    """Where its flag is."""
    flags_ptr = (address.to(tl.pointer_type(TYPE)) + M.to(tl.int64) * (2 * P * PLACE)).to(tl.pointer_type(tl.int32))
    return flags_ptr + ((call & 1) * P + source) * M + row
