"""From a step's hidden states to its tokens, which it also writes into the slot table.

Knows which rows sample (`prepare` said so), the decoder's head and the sampling kernels; knows no request.

Shape suffixes: T tokens of the step, D hidden size, R rows, N rows that sample, V vocabulary.
"""

import torch
from torch import Tensor

from tercet.model.decoder import Decoder
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.sample import sample
from tercet.triton_kernels.slot_table import SlotTable


def sample_step(decoder: Decoder, hidden_TD: Tensor, inputs: StepInputs, rows: StepRows, table: SlotTable) -> Tensor:
    """Token of each row, int32 [R], -1 where it samples none. Every rank computes the same.

    With kernels all rows are computed, padding too: fixed shapes, graph-safe. Without, only rows that sample.
    """
    if use_kernels(hidden_TD):
        return _sample_all(decoder, hidden_TD, inputs, rows, table)
    token_ids_R = torch.full_like(rows.positions_R, -1)
    rows_N = (rows.positions_R >= 0).nonzero().squeeze(1)
    if len(rows_N):  # all ranks agree on this: their tables are the same
        slots_N, positions_N = rows.slots_R[rows_N], rows.positions_R[rows_N]
        logits_NV = decoder.logits(hidden_TD[inputs.sample_rows_R[rows_N]])
        token_ids_R[rows_N] = sample(logits_NV, slots_N, positions_N, table)
    return token_ids_R


def _sample_all(decoder: Decoder, hidden_TD: Tensor, inputs: StepInputs, rows: StepRows, table: SlotTable) -> Tensor:
    # Decode rows alone are in their place already.
    alone = not inputs.chunk_slots_C.shape[0]
    hidden_RD = hidden_TD if alone else embedding(inputs.sample_rows_R, hidden_TD)
    return sample(decoder.logits(hidden_RD), rows.slots_R, rows.positions_R, table)
