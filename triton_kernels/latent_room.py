"""Room for keys and values of each head, made of latents for as long as one layer attends to them.

A query times latents as they lie takes two to three times the products that it takes with keys and values. Where many
queries of a prompt see the same tokens, it pays to make those first: of all tokens that the step's chunks see, if there
is room for so many. What is made of a token is the same in every step, and lies there until the next layer's is.

Shape suffixes: C chunks, C1 = C + 1, W pages of the room, H heads, P tokens of a page of the room, X numbers of a
head's key that are made of a latent and of its value, L numbers of a latent, S slots, M pages of a slot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

ROOM_PAGE = 128
PIECE = 64
"""Numbers that attention loads of a row at once, and tokens of a page of the cache, or some times as many."""
_FEWEST_TOKENS = 256
"""Of a step's chunks. Of fewer, and far behind a prompt's beginning, keys would be made for too few queries."""
_MOST_TOKENS = 65_536
"""Of room, but for a step's own: 1 GiB for 32 heads with keys and values of 128 numbers."""
_SIZES = ["C", "M", "most", "num_decodes"]


@dataclass(frozen=True)
class Room:
    """How a step's chunks are served: all by keys and values in the room, or all by latents where it is too small."""

    first_pages_C: Tensor
    """Where each chunk's sequence begins in it."""
    num_pages_1: Tensor
    """In use; 0: by latents."""
    expanded_starts_C1: Tensor
    """Of each chunk's tokens those that it serves: all or none. As query_starts are."""
    latent_starts_C1: Tensor
    """The others."""
    latent_rows_1: Tensor
    """Tokens of the step, decode rows first, that attend to latents."""
    pages_WHPX: Tensor


def room_for(
    num_tokens: int, num_chunks: int, longest: int, num_heads: int, still: int, turned: int, value: int, cache: Tensor
) -> Room | None:
    """Memory for a step with so many tokens in chunks, of sequences of up to `longest` tokens; None where it does not
    pay, or where the kernel that reads the room does not know such heads."""
    whole = still % PIECE == 0 and turned == PIECE and value in (128, 256) and cache.shape[2] % PIECE == 0
    fits = still + turned <= 4 * PIECE and cache.dtype.itemsize == 2 and is_hopper(cache.device)
    if not (whole and fits) or num_tokens < _FEWEST_TOKENS:
        return None
    num_pages = cdiv(max(num_tokens, min(longest, _MOST_TOKENS)), ROOM_PAGE) + num_chunks

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=cache.device)

    return Room(
        first_pages_C=ints(num_chunks),
        num_pages_1=ints(1),
        expanded_starts_C1=ints(num_chunks + 1),
        latent_starts_C1=ints(num_chunks + 1),
        latent_rows_1=ints(1),
        pages_WHPX=cache.new_empty(num_pages, num_heads, ROOM_PAGE, still + value),
    )


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _room_kernel(
    chunk_starts_ptr, query_starts_ptr, num_tokens_ptr, first_pages_ptr, num_pages_ptr, expanded_ptr, latent_ptr,
    rows_ptr, C, most, num_decodes, BLOCK_C: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,): one program gives each chunk's sequence its pages, if there is room for all."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    chunks = tl.arange(0, BLOCK_C)
    inside = chunks < C
    begins = tl.load(query_starts_ptr + chunks, mask=inside, other=0)
    counts = tl.load(query_starts_ptr + chunks + 1, mask=inside, other=0) - begins
    starts = tl.load(chunk_starts_ptr + chunks, mask=inside, other=0)
    end = tl.load(query_starts_ptr + C)
    pages = tl.where(inside & (counts > 0), tl.cdiv(starts + counts, PAGE), 0)
    total = tl.sum(pages, 0)
    fits = total <= most
    tl.store(first_pages_ptr + chunks, tl.cumsum(pages, 0) - pages, mask=inside)
    tl.store(num_pages_ptr, tl.where(fits, total, 0))
    tl.store(expanded_ptr + chunks, tl.where(fits, begins, end), mask=inside)
    tl.store(latent_ptr + chunks, tl.where(fits, end, begins), mask=inside)
    tl.store(expanded_ptr + C, end)
    tl.store(latent_ptr + C, end)
    tl.store(rows_ptr, tl.where(fits, num_decodes, tl.load(num_tokens_ptr)))


def plan_room(
    chunk_starts_C: Tensor, query_starts_C1: Tensor, num_tokens_1: Tensor, num_decodes: int, room: Room
) -> None:
    """Share out the room among a step's chunks. Graph-safe: once per step, before its tiles are cut."""
    C = len(chunk_starts_C)
    _room_kernel[(1,)](
        chunk_starts_C, query_starts_C1, num_tokens_1, room.first_pages_C, room.num_pages_1, room.expanded_starts_C1,
        room.latent_starts_C1, room.latent_rows_1, C, len(room.pages_WHPX), num_decodes,
        BLOCK_C=next_power_of_2(max(C, 1)), PAGE=ROOM_PAGE, num_warps=1, **overlap_options(chunk_starts_C),
    )  # fmt: skip


@triton.jit(do_not_specialize=["C", "M", "num_programs"], do_not_specialize_on_alignment=["C", "M", "num_programs"])
def _expand_kernel(
    cache_ptr, up_ptr, page_table_ptr, slots_ptr, chunk_starts_ptr, query_starts_ptr, first_pages_ptr, num_pages_ptr,
    room_ptr, C, M, num_programs,
    H: tl.constexpr, L: tl.constexpr, D: tl.constexpr, X: tl.constexpr, CACHE_PAGE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_L: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (num_programs,): each program makes BLOCK_X numbers of one head for one page of the room, or those of every
    num_programs-th such block. Behind a sequence's end there are zeros."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    chunks = tl.arange(0, BLOCK_C)
    inside = chunks < C
    first_pages = tl.load(first_pages_ptr + chunks, mask=inside, other=2**30)
    begins = tl.load(query_starts_ptr + chunks, mask=inside, other=0)
    counts = tl.load(query_starts_ptr + chunks + 1, mask=inside, other=0) - begins
    lengths = tl.load(chunk_starts_ptr + chunks, mask=inside, other=0) + counts
    tokens, numbers = tl.arange(0, PAGE), tl.arange(0, BLOCK_L)
    blocks: tl.constexpr = X // BLOCK_X
    for block in range(tl.program_id(0), tl.load(num_pages_ptr) * (H * blocks), num_programs):
        page = block // (H * blocks)
        head = block // blocks % H
        # Chunks of nothing have the first page of the one behind them: the last that begins here is it.
        own = tl.max(tl.where((first_pages <= page) & (counts > 0), chunks, 0), 0)
        is_own = chunks == own
        first = (page - tl.sum(tl.where(is_own, first_pages, 0), 0)) * PAGE
        length = tl.sum(tl.where(is_own, lengths, 0), 0)
        slot = tl.load(slots_ptr + own).to(tl.int64)
        positions = first + tokens
        known = positions < length
        pages = tl.load(page_table_ptr + slot * M + positions // CACHE_PAGE, mask=known, other=0).to(tl.int64)
        cell_ptrs = cache_ptr + (pages * CACHE_PAGE + positions % CACHE_PAGE)[:, None] * D + numbers[None, :]
        columns = block % blocks * BLOCK_X + tl.arange(0, BLOCK_X)
        up_ptrs = up_ptr + (head * X + columns).to(tl.int64)[None, :] * L + numbers[:, None]
        acc = tl.zeros((PAGE, BLOCK_X), tl.float32)
        for start in tl.range(0, L, BLOCK_L, num_stages=STAGES):
            latents = tl.load(cell_ptrs + start, mask=known[:, None], other=0.0)
            acc = tl.dot(latents, tl.load(up_ptrs + start), acc)
        out_ptrs = room_ptr + ((page * H + head).to(tl.int64) * PAGE + tokens)[:, None] * X + columns[None, :]
        tl.store(out_ptrs, acc.to(room_ptr.dtype.element_ty))


def expand_latents(
    cache: Tensor, up_HXL: Tensor, page_table_SM: Tensor, chunk_slots_C: Tensor, chunk_starts_C: Tensor,
    query_starts_C1: Tensor, room: Room,
) -> None:  # fmt: skip
    """Fill the room with one layer's keys and values: of each head, `up_HXL` times the latents that chunks see.
    Accumulates in fp32, rounded once. Graph-safe; `room` is planned."""
    H, X, L = up_HXL.shape
    C = len(chunk_slots_C)
    num_programs = 3 * multiprocessors(cache.device)
    _expand_kernel[(num_programs,)](
        cache, up_HXL, page_table_SM, chunk_slots_C, chunk_starts_C, query_starts_C1, room.first_pages_C,
        room.num_pages_1, room.pages_WHPX, C, page_table_SM.shape[1], num_programs,
        H=H, L=L, D=cache.shape[3], X=X, CACHE_PAGE=cache.shape[2], PAGE=ROOM_PAGE,
        BLOCK_C=next_power_of_2(max(C, 1)), BLOCK_X=128 if X % 128 == 0 else PIECE, BLOCK_L=64, STAGES=3,
        num_warps=4, **overlap_options(cache),
    )  # fmt: skip
