"""Which adapter each token of a step goes through, and each row: its slot's; both grouped by that.

Shape suffixes: as in `prepare.py`; S slots, I tokens and then rows.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_indices
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.row_groups import group_rows
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_BLOCK = 64
_SIZES = ["B", "T", "S"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _token_adapters_kernel(
    decode_slots_ptr, chunk_slots_ptr, query_starts_ptr, adapters_ptr, out_ptr, B, T, S,
    C: tl.constexpr, BLOCK_C: tl.constexpr, TRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens and rows,): one program owns BLOCK of them; tokens of chunks find theirs by counting ends.
    Behind the tokens come rows only where there are chunks: else each token is one."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = B * TRIES
    slot = tl.load(decode_slots_ptr + index // TRIES, mask=index < first, other=-1)
    if C > 0:
        chunk = tl.arange(0, BLOCK_C)
        end = tl.load(query_starts_ptr + 1 + chunk, mask=chunk < C, other=0)
        ended = (end[None, :] <= (index - first)[:, None]) & (chunk < C)[None, :]
        own = tl.where(index < T, tl.sum(ended.to(tl.int32), 1), index - T - B)
        row = index - T
        slot = tl.where((row >= 0) & (row < B), tl.load(decode_slots_ptr + row, mask=(row >= 0) & (row < B)), slot)
        of_chunk = (index >= first) & (own >= 0) & (own < C)
        slot = tl.where(of_chunk, tl.load(chunk_slots_ptr + own, mask=of_chunk), slot)
    adapter = tl.load(adapters_ptr + slot, mask=(slot >= 0) & (slot < S), other=-1)
    tl.store(out_ptr + index, adapter, mask=index < (T + B + C if C > 0 else T))


def token_adapters(inputs: StepInputs, adapter_S: Tensor) -> tuple[Tensor, Tensor]:
    """The adapter of each token and of each row, -1 where it has none or is padding: int32 [T], [R]. Graph-safe."""
    T, B, C = len(inputs.positions_T), len(inputs.decode_slots_B), len(inputs.chunk_slots_C)
    check_indices("adapters", adapter_S, inputs.positions_T, None)
    if not use_kernels(adapter_S):
        return token_adapters_reference(inputs, adapter_S)
    num_rows = B + C if C else 0
    out_I = torch.empty(T + num_rows, dtype=torch.int32, device=adapter_S.device)
    if T:
        block_c = next_power_of_2(max(C, 1))
        block = max(16, min(_BLOCK, 2**16 // block_c))
        _token_adapters_kernel[(cdiv(len(out_I), block),)](
            inputs.decode_slots_B, inputs.chunk_slots_C, inputs.query_starts_C1, adapter_S, out_I, B, T, len(adapter_S),
            C=C, BLOCK_C=block_c, TRIES=inputs.tries, BLOCK=block, num_warps=2,
        )  # fmt: skip
    return (out_I[:T], out_I[T:]) if C else (out_I, out_I)


def with_adapters(inputs: StepInputs, adapter_S: Tensor, num_adapters: int, *, deterministic: bool) -> StepInputs:
    """The inputs of a step of which tokens go through adapters: with groups."""
    of_tokens, of_rows = token_adapters(inputs, adapter_S)
    groups_T = group_rows(of_tokens, num_adapters, deterministic=deterministic)
    groups_R = groups_T
    if of_rows is not of_tokens:
        groups_R = group_rows(of_rows, num_adapters, deterministic=deterministic)
    return replace(inputs, groups_T=groups_T, groups_R=groups_R)


def token_adapters_reference(inputs: StepInputs, adapter_S: Tensor) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    out_T = torch.full_like(inputs.positions_T, -1)
    decodes_T = inputs.decode_slots_B.repeat_interleave(inputs.tries).long()
    lengths_C = inputs.query_starts_C1[: len(inputs.chunk_slots_C) + 1].diff().long()
    slots = torch.cat([decodes_T, inputs.chunk_slots_C.long().repeat_interleave(lengths_C)])
    out_T[: len(slots)] = adapter_S[slots]
    if not len(inputs.chunk_slots_C):
        return out_T, out_T
    return out_T, adapter_S[torch.cat([inputs.decode_slots_B, inputs.chunk_slots_C]).long()]
