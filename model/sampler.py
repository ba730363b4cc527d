"""From a step's hidden states to its tokens, which it also writes into the slot table.

Knows which rows sample (`prepare` said so), the decoder's head and the sampling kernels; knows no request.

Shape suffixes: T tokens of the step, D hidden size, R rows, N rows that sample, V vocabulary.
"""

import torch
from torch import Tensor

from tercet.model.decoder import Decoder
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.sample import TokenRing, sample, sample_into
from tercet.triton_kernels.slot_table import SlotTable


def sample_step(decoder: Decoder, hidden_TD: Tensor, inputs: StepInputs, rows: StepRows, table: SlotTable) -> Tensor:
    """Token of each row, int32 [R], -1 where it samples none. Only rows that sample are computed: not graph-safe.

    Every rank computes the same.
    """
    token_ids_R = torch.full_like(rows.positions_R, -1)
    rows_N = (rows.positions_R >= 0).nonzero().squeeze(1)
    if len(rows_N):  # all ranks agree on this: their tables are the same
        slots_N, positions_N = rows.slots_R[rows_N], rows.positions_R[rows_N]
        logits_NV = decoder.logits(hidden_TD[inputs.sample_rows_R[rows_N]])
        token_ids_R[rows_N] = sample(logits_NV, slots_N, positions_N, table)
    return token_ids_R


def sample_step_into(
    ring: TokenRing, decoder: Decoder, hidden_TD: Tensor, inputs: StepInputs, rows: StepRows, table: SlotTable
) -> None:
    """The same for all rows, padding too, into the next place of the ring: kernels only, fixed shapes, graph-safe."""
    # Decode rows alone are in their place already.
    alone = not inputs.chunk_slots_C.shape[0]
    hidden_RD = hidden_TD if alone else embedding(inputs.sample_rows_R, hidden_TD)
    sample_into(ring, decoder.logits(hidden_RD), rows.slots_R, rows.positions_R, table)
