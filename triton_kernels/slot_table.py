"""The slot table: one row per running request, on the device.

A request's token ids never leave the device between steps: a record of the plan brings them once, then each step
appends one. The last slot is a dummy for padding rows: always done. Knows rows; how a plan
changes them is in `write_plan.py`.

Shape suffixes: S slots, M pages of a slot, L positions of a slot, E stop ids of a slot, N records, W words, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels

MAX_STOP_IDS = 8
RECORD_WORDS = 25
"""One record, int32: slot, first position, count and offset of the ids it brings; length, max_length, min_length,
done, top_k; temperature, top_p, min_p (bits of fp32); seed (low, high); num_prompt, adapter, shift; stop ids (-1:
none)."""


@dataclass(frozen=True)
class SlotTable:
    """Rows of running requests. All int32 but the three fp32 of sampling and the int64 seed."""

    page_table_SM: Tensor
    """Layers with windows may have page tables of their own: those of all slots of one lie behind those of another."""
    token_ids_SL: Tensor
    """Prompt and generated tokens."""
    length_S: Tensor
    """Tokens known."""
    num_prompt_S: Tensor
    max_length_S: Tensor
    """The request is done once it is this long."""
    min_length_S: Tensor
    """Stop ids are not sampled at positions below this."""
    done_S: Tensor
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    seed_S: Tensor
    adapter_S: Tensor
    """Which adapter its tokens go through; -1: none."""
    shift_S: Tensor
    """How much further, behind the prompt's images, tokens are turned than they are counted: an image takes fewer turns
    than it has tokens."""
    stop_ids_SE: Tensor

    @property
    def num_page_tables(self) -> int:
        return self.page_table_SM.shape[0] // self.length_S.shape[0]

    @property
    def page_tables(self) -> Sequence[Tensor]:
        """Each by itself."""
        return self.page_table_SM.chunk(self.num_page_tables)

    def check(self) -> None:
        """Refuse a table whose tensors do not fit each other."""
        S = self.length_S.shape[0]
        for field in fields(self):
            name, tensor = field.name, getattr(self, field.name)
            check_contiguous(name, tensor)
            check_device(name, tensor, self.length_S)
            if name in ("temperature_S", "top_p_S", "min_p_S"):
                check_dtype(name, tensor, torch.float32)
            else:
                check_dtype(name, tensor, torch.int64 if name == "seed_S" else torch.int32)
            if tensor.ndim == 1:
                check_shape(name, tensor, S)
        check_shape("page_table_SM", self.page_table_SM, S * max(self.num_page_tables, 1), None)
        check_shape("token_ids_SL", self.token_ids_SL, S, None)
        check_shape("stop_ids_SE", self.stop_ids_SE, S, MAX_STOP_IDS)


@triton.jit(do_not_specialize=["S", "L"], do_not_specialize_on_alignment=["S", "L"])
def _tokens_at_kernel(slots_ptr, positions_ptr, token_ids_ptr, out_ptr, S, L):
    """Grid (R,): one program looks up one token."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    inside = (slot >= 0) & (slot < S) & (position >= 0) & (position < L)
    tl.store(out_ptr + row, tl.load(token_ids_ptr + slot.to(tl.int64) * L + position, mask=inside, other=-1))


def tokens_at(slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """The token at each row's position of its slot, -1 where that is outside: int32 [R]. Graph-safe."""
    for name, tensor in (("slots", slots_R), ("positions", positions_R)):
        check_shape(name, tensor, slots_R.shape[0])
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.token_ids_SL)
    if not use_kernels(slots_R):
        return tokens_at_reference(slots_R, positions_R, table)
    out_R = torch.empty_like(slots_R)
    if len(slots_R):
        _tokens_at_kernel[(len(slots_R),)](
            slots_R, positions_R, table.token_ids_SL, out_R, *table.token_ids_SL.shape, num_warps=1
        )
    return out_R


def tokens_at_reference(slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """The same in PyTorch."""
    S, L = table.token_ids_SL.shape
    inside_R = (slots_R >= 0) & (slots_R < S) & (positions_R >= 0) & (positions_R < L)
    token_ids_R = table.token_ids_SL[slots_R.clamp(0, S - 1).long(), positions_R.clamp(0, L - 1).long()]
    return token_ids_R.masked_fill(~inside_R, -1)
