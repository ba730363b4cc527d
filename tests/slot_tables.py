"""Slot tables and plans with random contents, for the tests of kernels that read and write them."""

import torch
from torch import Tensor

from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, SlotTable


def random_table(
    num_slots: int, num_pages_each: int, page_size: int, vocab: int, seed: int, num_pages: int = 0, tables: int = 1
) -> SlotTable:
    """Live slots of random lengths, with pages in random order, in each of the page tables in another; the last slot is
    the dummy."""
    g = torch.Generator().manual_seed(seed)
    length = num_pages_each * page_size
    total = num_pages or num_slots * num_pages_each + 1

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    table = SlotTable(
        page_table_SM=torch.cat(
            [torch.randperm(total - 1, generator=g)[: num_slots * num_pages_each] + 1 for _ in range(tables)]
        )
        .view(tables * num_slots, num_pages_each)
        .int(),
        token_ids_SL=ints(0, vocab, num_slots, length),
        length_S=ints(1, length, num_slots),
        num_prompt_S=torch.ones(num_slots, dtype=torch.int32),
        max_length_S=torch.full((num_slots,), length, dtype=torch.int32),
        min_length_S=torch.zeros(num_slots, dtype=torch.int32),
        done_S=torch.zeros(num_slots, dtype=torch.int32),
        temperature_S=torch.zeros(num_slots),
        top_k_S=torch.zeros(num_slots, dtype=torch.int32),
        top_p_S=torch.ones(num_slots),
        min_p_S=torch.zeros(num_slots),
        adapter_S=torch.full((num_slots,), -1, dtype=torch.int32),
        shift_S=ints(-9, 10, num_slots),
        seed_S=torch.randint(0, 2**63 - 1, (num_slots,), generator=g, dtype=torch.int64),
        stop_ids_SE=torch.full((num_slots, MAX_STOP_IDS), -1, dtype=torch.int32),
    )
    table.length_S[-1] = 0
    table.done_S[-1] = 1
    table.check()
    return table


def empty_step(
    decode_slots: list[int], chunks: list[tuple[int, int, int]], num_tokens: int, tables: int = 1
) -> tuple[StepInputs, StepRows]:
    """A step's plan (chunks: slot, start, length), its outputs filled with nonsense."""
    B, C = len(decode_slots), len(chunks)

    def rubbish(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((size,), -77, dtype=dtype)

    slots_R = torch.tensor([*decode_slots, *(slot for slot, _, _ in chunks)], dtype=torch.int32)
    starts_C = torch.tensor([start for _, start, _ in chunks], dtype=torch.int32)
    lengths_C = torch.tensor([length for _, _, length in chunks], dtype=torch.int32)
    inputs = StepInputs(
        input_ids_T=rubbish(B + num_tokens),
        positions_T=rubbish(B + num_tokens),
        kv_slots_XT=rubbish(tables * (B + num_tokens + 3), torch.int64).view(tables, -1)[:, : B + num_tokens],
        decode_slots_B=slots_R[:B],
        decode_lengths_B=rubbish(B),
        chunk_slots_C=slots_R[B:],
        chunk_starts_C=starts_C,
        query_starts_C1=rubbish(C + 1),
        sample_rows_R=rubbish(B + C),
        num_tokens_1=rubbish(1),
    )
    return inputs, StepRows(slots_R, starts_C, lengths_C, rubbish(B + C))
