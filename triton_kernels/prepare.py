"""From the rows of a plan and the slot table to everything the layers of one step read.

A step's tokens: first one for each of B decode rows, then the packed tokens of C prefill chunks, padding at the end of
either part. Its rows, which may sample: the decodes, then the chunks. Padding rows name the dummy slot, padding chunks
have no tokens; both compute on zeros and write to page 0. So does a decode row whose request is done.

Shape suffixes: B decode rows, C chunks, R = B + C rows, T = B + prefill tokens, C1 = C + 1, X page tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.kv_slots import check_kv_slots, store_kv_slots
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.row_groups import RowGroups
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.tried_tokens import TriedTokens

_BLOCK = 64


class ImageRows(NamedTuple):
    """What stands for tokens of images; other rows are anything."""

    stream_TD: Tensor
    """In place of their embeddings."""
    deep: tuple[Tensor, ...]
    """[T, D]: what is added to the stream behind the first layers, one after the other."""


class ImageEnds(NamedTuple):
    """How far tokens of images see that see each other."""

    ends_T: Tensor
    """As of `prefill_attention`."""
    in_windows: bool
    """In layers with a window alone."""


class TurnedTokens(NamedTuple):
    """By what tokens are turned, each by a row of its own."""

    places_T: Tensor
    """Which, in the place of positions."""
    cos_sin_TR: Tensor


@dataclass(frozen=True)
class StepInputs:
    """What every layer of one step reads."""

    input_ids_T: Tensor
    positions_T: Tensor
    """By which tokens are turned: where they are, but for what images shift (`SlotTable.shift_S`)."""
    kv_slots_XT: Tensor
    """int64: page * page size + offset, where this token's K and V go in layers of each page table. Rows may lie
    apart."""
    decode_slots_B: Tensor
    decode_lengths_B: Tensor
    """KV length, this token included; 0 for rows that compute nothing."""
    chunk_slots_C: Tensor
    chunk_starts_C: Tensor
    """Position of the chunk's first token."""
    query_starts_C1: Tensor
    """Offset of each chunk's first token among the prefill tokens, and the end of the last."""
    sample_rows_R: Tensor
    """The token whose hidden state a row samples from."""
    num_tokens_1: Tensor
    """How many tokens there are, all decode rows among them: what lies behind is padding."""
    tries: int = 1
    """Tokens of each decode row, behind each other: more than one in a step with guesses (`trials.py`)."""
    lengths_T: Tensor | None = None
    """Then, what each of them sees: that is not more than its row's length."""
    tried: TriedTokens | None = None
    """In a step with guesses, whose its tokens are, however many of them a decode row has."""
    groups_T: RowGroups | None = None
    """Tokens by the adapters that they go through (`token_adapters.py`); None in a step where none does."""
    groups_R: RowGroups | None = None
    """The same of rows."""
    shifts_S: Tensor | None = None
    """`SlotTable.shift_S`, of a model whose images shift."""
    image_rows: ImageRows | None = None
    """In a step with tokens of images, what is there in place of their embeddings."""
    turned: TurnedTokens | None = None
    """And by what its tokens are turned, if places in images are no numbers."""
    ends: ImageEnds | None = None
    """And how far those see that see each other."""

    def page_tables(self, page_table_SM: Tensor) -> Sequence[Tensor]:
        """Each by itself, of `SlotTable.page_table_SM`."""
        return page_table_SM.chunk(len(self.kv_slots_XT))

    def ends_for(self, window: int) -> Tensor | None:
        """`ends_T` of `prefill_attention` in layers with this window; 0: they have none."""
        return None if self.ends is None or (self.ends.in_windows and not window) else self.ends.ends_T

    @property
    def told_tokens_1(self) -> Tensor | None:
        """`num_tokens_1` where it pays to look: only prefill is padded so much."""
        return self.num_tokens_1 if self.chunk_slots_C.shape[0] else None


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: the plan's part, which `prepare` reads, and where their next tokens go, which it writes."""

    slots_R: Tensor
    chunk_starts_C: Tensor
    chunk_lengths_C: Tensor
    positions_R: Tensor
    """Position of the token that this row samples; -1 where it samples none."""


_SIZES = ["B", "T", "S", "L", "M", "stride", "num_pages"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _prepare_kernel(
    slots_ptr, chunk_starts_ptr, chunk_lengths_ptr, page_table_ptr, token_ids_ptr, length_ptr, done_ptr, shift_ptr,
    input_ids_ptr, positions_ptr, kv_slots_ptr, decode_lengths_ptr, query_starts_ptr, sample_rows_ptr, num_tokens_ptr,
    sample_positions_ptr, B, T, S, L, M, stride, num_pages, X: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of decode rows + tiles of prefill tokens,); the program of the first prefill tile does the chunks.

    Each prefill program sums up the chunks' lengths for itself and finds each token's chunk by counting ends.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    tile = tl.program_id(0)
    num_decode_tiles = tl.cdiv(B, BLOCK)
    if tile < num_decode_tiles:
        row = tile * BLOCK + tl.arange(0, BLOCK)
        mask = row < B
        slot = tl.load(slots_ptr + row, mask=mask, other=-1)
        alive = (slot >= 0) & (slot < S)
        length = tl.load(length_ptr + slot, mask=alive, other=0)
        done = tl.load(done_ptr + slot, mask=alive, other=1)
        alive &= (done == 0) & (length > 0) & (length <= L)
        position = tl.where(alive, length - 1, 0)
        ids = tl.load(token_ids_ptr + slot.to(tl.int64) * L + position, mask=alive, other=0)
        tl.store(input_ids_ptr + row, ids, mask=mask)
        shift = tl.load(shift_ptr + slot, mask=alive, other=0)
        tl.store(positions_ptr + row, position + shift, mask=mask)
        store_kv_slots(
            kv_slots_ptr, page_table_ptr, row, slot, position, alive, mask, row, S, M, stride, num_pages, X, PAGE
        )  # fmt: skip
        tl.store(decode_lengths_ptr + row, tl.where(alive, length, 0), mask=mask)
        tl.store(sample_rows_ptr + row, row, mask=mask)
        tl.store(sample_positions_ptr + row, tl.where(alive & (length < L), length, -1), mask=mask)
    else:
        chunk = tl.arange(0, BLOCK_C)
        chunk_mask = chunk < C
        chunk_length = tl.load(chunk_lengths_ptr + chunk, mask=chunk_mask, other=0)
        end = tl.cumsum(chunk_length, 0)
        token = (tile - num_decode_tiles) * BLOCK + tl.arange(0, BLOCK)
        mask = token < T - B
        # The number of chunks that end at or before a token is the index of its own.
        own = tl.sum((end[None, :] <= token[:, None]).to(tl.int32) * chunk_mask[None, :].to(tl.int32), 1)
        inside = mask & (own < C)
        is_own = (chunk[None, :] == own[:, None]) & chunk_mask[None, :]
        begin = tl.sum(tl.where(is_own, (end - chunk_length)[None, :], 0), 1)
        slot = tl.load(slots_ptr + B + own, mask=inside, other=-1)
        start = tl.load(chunk_starts_ptr + own, mask=inside, other=0)
        position = start + token - begin
        inside &= (slot >= 0) & (slot < S) & (position >= 0) & (position < L)
        position = tl.where(inside, position, 0)
        ids = tl.load(token_ids_ptr + slot.to(tl.int64) * L + position, mask=inside, other=0)
        tl.store(input_ids_ptr + B + token, ids, mask=mask)
        shift = tl.load(shift_ptr + slot, mask=inside, other=0)
        tl.store(positions_ptr + B + token, position + shift, mask=mask)
        store_kv_slots(
            kv_slots_ptr + B, page_table_ptr, token, slot, position, inside, mask, token, S, M, stride, num_pages, X,
            PAGE,
        )  # fmt: skip
        if tile == num_decode_tiles:
            tl.store(query_starts_ptr + chunk, end - chunk_length, mask=chunk_mask)
            tl.store(query_starts_ptr + C, tl.sum(chunk_length, 0))
            tl.store(num_tokens_ptr, B + tl.sum(chunk_length, 0))
            chunk_slot = tl.load(slots_ptr + B + chunk, mask=chunk_mask, other=-1)
            chunk_start = tl.load(chunk_starts_ptr + chunk, mask=chunk_mask, other=0)
            known = tl.load(length_ptr + chunk_slot, mask=(chunk_slot >= 0) & (chunk_slot < S), other=-1)
            samples = (chunk_length > 0) & (chunk_start + chunk_length == known) & (known < L)
            tl.store(sample_rows_ptr + B + chunk, B + tl.maximum(end - 1, 0), mask=chunk_mask)
            tl.store(sample_positions_ptr + B + chunk, tl.where(samples, known, -1), mask=chunk_mask)


def prepare(rows: StepRows, table: SlotTable, inputs: StepInputs, *, page_size: int, num_pages: int) -> None:
    """Fill `inputs` and `rows.positions_R` from the plan's part of `rows` and the table. Integers only; graph-safe.

    `inputs.decode_slots_B`, `chunk_slots_C` and `chunk_starts_C` are the plan's own tensors and only checked here.
    """
    B, C, T = _check(rows, table, inputs)
    if not use_kernels(rows.slots_R):
        prepare_reference(rows, table, inputs, page_size=page_size, num_pages=num_pages)
        return
    S, L = table.token_ids_SL.shape
    block_c = next_power_of_2(max(C, 1))
    block = max(16, min(_BLOCK, 2**16 // block_c))  # of very many chunks longer ones take minutes to compile
    tiles = cdiv(B, block) + max(cdiv(T - B, block), 1)
    _prepare_kernel[(tiles,)](
        rows.slots_R, rows.chunk_starts_C, rows.chunk_lengths_C, table.page_table_SM, table.token_ids_SL,
        table.length_S, table.done_S, table.shift_S, inputs.input_ids_T, inputs.positions_T, inputs.kv_slots_XT,
        inputs.decode_lengths_B, inputs.query_starts_C1, inputs.sample_rows_R, inputs.num_tokens_1, rows.positions_R,
        B, T, S, L, table.page_table_SM.shape[1], inputs.kv_slots_XT.stride(0), num_pages, X=table.num_page_tables,
        C=C, BLOCK_C=block_c, BLOCK=block, PAGE=page_size, num_warps=2,
        **overlap_options(rows.slots_R),
    )  # fmt: skip


def prepare_reference(rows: StepRows, table: SlotTable, inputs: StepInputs, *, page_size: int, num_pages: int) -> None:
    """The same in PyTorch."""
    B, C = inputs.decode_slots_B.shape[0], inputs.chunk_slots_C.shape[0]
    T = inputs.input_ids_T.shape[0]
    L = table.token_ids_SL.shape[1]
    decode_slots_B, chunk_slots_C = rows.slots_R[:B].long(), rows.slots_R[B:].long()
    length_B = table.length_S[decode_slots_B]
    alive_B = (table.done_S[decode_slots_B] == 0) & (length_B > 0)
    length_B = torch.where(alive_B, length_B, 0)
    lengths_C = rows.chunk_lengths_C.long()
    ends_C = lengths_C.cumsum(0)
    num_tokens = int(ends_C[-1]) if C else 0
    own_T = torch.repeat_interleave(torch.arange(C), lengths_C)
    offsets_T = torch.arange(num_tokens) - (ends_C - lengths_C)[own_T]

    slots_T = torch.cat([decode_slots_B, chunk_slots_C[own_T]])
    positions_T = torch.cat([(length_B.long() - 1).clamp(min=0), rows.chunk_starts_C.long()[own_T] + offsets_T])
    alive_T = torch.cat([alive_B, torch.ones(num_tokens, dtype=torch.bool)])
    used = B + num_tokens
    for tensor in (inputs.input_ids_T, inputs.positions_T, *inputs.kv_slots_XT):
        tensor[used:T] = 0
    for page_table_SM, kv_slots_T in zip(table.page_tables, inputs.kv_slots_XT, strict=True):
        pages_T = torch.where(alive_T, page_table_SM[slots_T, positions_T // page_size], 0).long()
        pages_T = torch.where(pages_T < num_pages, pages_T, 0)
        kv_slots_T[:used] = torch.where(pages_T > 0, pages_T * page_size + positions_T % page_size, 0)
    inputs.input_ids_T[:used] = torch.where(alive_T, table.token_ids_SL[slots_T, positions_T], 0)
    inputs.positions_T[:used] = positions_T.int() + torch.where(alive_T, table.shift_S[slots_T], 0)

    inputs.decode_lengths_B.copy_(length_B)
    inputs.query_starts_C1[0] = 0
    inputs.query_starts_C1[1:] = ends_C.int()
    inputs.num_tokens_1[0] = B + num_tokens
    inputs.sample_rows_R[:B] = torch.arange(B)
    inputs.sample_rows_R[B:] = B + (ends_C - 1).clamp(min=0).int()
    known_C = table.length_S[chunk_slots_C]
    samples_C = (lengths_C > 0) & (rows.chunk_starts_C + lengths_C == known_C) & (known_C < L)
    rows.positions_R[:B] = torch.where(alive_B & (length_B < L), length_B, -1)
    rows.positions_R[B:] = torch.where(samples_C, known_C, -1)


def _check(rows: StepRows, table: SlotTable, inputs: StepInputs) -> tuple[int, int, int]:
    B, C, T = inputs.decode_slots_B.shape[0], inputs.chunk_slots_C.shape[0], inputs.input_ids_T.shape[0]
    if T < B:
        raise ValueError(f"input_ids: got {T} tokens, wanted at least one for each of {B} decode rows")
    wanted = {
        "input_ids": (inputs.input_ids_T, T),
        "positions": (inputs.positions_T, T),
        "decode_slots": (inputs.decode_slots_B, B),
        "decode_lengths": (inputs.decode_lengths_B, B),
        "chunk_slots": (inputs.chunk_slots_C, C),
        "chunk_starts": (inputs.chunk_starts_C, C),
        "query_starts": (inputs.query_starts_C1, C + 1),
        "sample_rows": (inputs.sample_rows_R, B + C),
        "num_tokens": (inputs.num_tokens_1, 1),
        "slots": (rows.slots_R, B + C),
        "plan's chunk_starts": (rows.chunk_starts_C, C),
        "chunk_lengths": (rows.chunk_lengths_C, C),
        "sample positions": (rows.positions_R, B + C),
    }
    for name, (tensor, size) in wanted.items():
        check_shape(name, tensor, size)
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.length_S)
    check_kv_slots(inputs.kv_slots_XT, table, T)
    return B, C, T
